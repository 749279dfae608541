"""`pdserve down`: end a cluster, also one whose `pdserve up` has died."""

from __future__ import annotations

import click

from pdserve.commands.failures import FAILED, one_line_errors, report
from pdserve.config import ADMIN_PORT


@click.command(short_help="End a cluster of this machine, and clean up after it.")
@click.option("--name", help="Name of the cluster (default: the one of --admin-port).")
@click.option(
    "--admin-port",
    type=click.IntRange(1, 65535),
    default=ADMIN_PORT,
    show_default=True,
    help="The --admin-port that the cluster was started with, where it has no --name.",
)
@one_line_errors
def down(name: str | None, admin_port: int) -> int:
    """End a cluster of this machine: `pdserve up` if it lives, the router, all workers, and their files.

    It ends what an `up` that died has left, too. Running requests are cancelled. Workers on other machines are drained through
    the router. Status 0: nothing is left; asked again, it finds nothing and says so.
    """
    from pdserve.cluster.keeping.ending import end_cluster
    from pdserve.cluster.record import ClusterRecord, cluster_names, default_name, marked

    name = name or default_name(admin_port)
    if ClusterRecord.find(name) is None and not marked(name):
        others = ", ".join(cluster_names())
        click.echo(f"nothing of the cluster {name} runs here" + (f"; there is: {others}" if others else ""))
        return 0
    ended = end_cluster(name, click.echo)
    for process in ended.processes:
        report(f"still runs: process {process.pid}", FAILED)
    for worker in ended.elsewhere:
        report(f"still runs: {worker}", FAILED)
    if ended.clean:
        click.echo(f"the cluster {name} has ended; nothing of it is left")
    return 0 if ended.clean else FAILED
