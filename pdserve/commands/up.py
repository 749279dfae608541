"""`pdserve up`: start a cluster, print its addresses, and keep it up until a signal."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from pdserve.commands.failures import FAILED, one_line_errors, report
from pdserve.commands.settings import ClusterCommand, cluster_config, cluster_options

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve.cluster.launch import Cluster
    from pdserve.commands.progress import StartView
    from pdserve.commands.stopping import StopSignals
    from pdserve.config import ClusterConfig


@click.command(cls=ClusterCommand, short_help="Start a cluster, and run it until Ctrl-C.")
@cluster_options
@click.option(
    "--cluster-token",
    default="",
    envvar="PDSERVE_CLUSTER_TOKEN",
    show_envvar=True,
    help="Secret of the router, its workers, and administrators on other machines (default: a new one).",
)
@click.option(
    "--name",
    default=None,
    help="Name of the cluster on this machine, by which the next `pdserve up` finds it (default: pdserve- and the admin port).",
)
@click.option(
    "--leave-running",
    is_flag=True,
    help="Ctrl-C ends only this process: the cluster serves on for the next `pdserve up`, and `pdserve down` ends it.",
)
@click.option("--bound", is_flag=True, help="The cluster ends with this process, even if this process is killed.")
@one_line_errors
def up(cluster_token: str, name: str | None, leave_running: bool, bound: bool, **flags: Any) -> int:
    """Start a router and both pools, and run until SIGINT or SIGTERM. A second signal stops at once.

    Stopping ends the router first, once its streams have ended, unless --leave-running is given. `pdserve drain` takes one
    worker out of service. If this process is killed the cluster serves on, and the next `pdserve up` of its name adopts it.
    """
    if bound and (name or leave_running):
        given = "--name" if name else "--leave-running"
        raise click.UsageError(
            f"{given} is for a cluster that another `pdserve up` can find, and --bound for one that ends with this"
        )
    config = cluster_config(**flags)
    from pdserve.cluster.record import default_name
    from pdserve.commands.stopping import StopSignals
    from pdserve.observe.title import set_title

    set_title("up")
    lasting = "" if bound else default_name(config.router.admin_port_or_default) if name is None else name
    with StopSignals() as stop:
        return stop.run(functools.partial(_serve, config, stop, cluster_token, lasting, leave_running=leave_running))


def _serve(config: ClusterConfig, stop: StopSignals, cluster_token: str, lasting: str, *, leave_running: bool) -> int:
    """Start the cluster, supervise it and close it. Return 0, also when a signal came during the start."""
    from pdserve.cluster.errors import Interrupted
    from pdserve.cluster.launch import Cluster
    from pdserve.commands.console import make_console
    from pdserve.commands.progress import StartView

    console = make_console(steady=True)
    view = StartView(console, after_ray=stop.reclaim)
    made = Cluster(
        config, stop=stop.event, listener=view, cluster_token=cluster_token, lasting=lasting, leave_running=leave_running
    )
    try:
        with made as cluster:
            stop.at_once = functools.partial(_end_at_once, cluster)
            _start(cluster, view, console)
            cluster.supervise()
            if not cluster.leaves:
                console.print("stopping: running requests finish first; a second signal stops at once")
    except Interrupted:
        console.print("stopped while starting")
    else:
        if not made.leaves and not made.left:
            console.print("stopped; nothing is left running")
    if made.leaves:
        console.print(f"the cluster serves on; `pdserve down --name {made.name}` ends it")
    if made.left:
        report(_left(made), FAILED)
    return FAILED if made.left else 0


def _end_at_once(cluster: Cluster) -> None:
    cluster.kill()
    if cluster.left:
        report(_left(cluster), FAILED)


def _left(cluster: Cluster) -> str:
    return f"not stopped: {', '.join(cluster.left)}; `pdserve up --name {cluster.name}` adopts what runs there"


def _start(cluster: Cluster, view: StartView, console: Console) -> None:
    from pdserve.client import InferenceClient
    from pdserve.cluster.launch import reachable
    from pdserve.commands import tables

    with view:
        endpoints = cluster.start()
    with InferenceClient(reachable(endpoints.grpc)) as client:
        info = client.model_info()
        console.print(tables.pool(cluster.reports))
    dtypes = f"{info.dtype}, KV in {info.kv_cache_dtype}"
    console.print(f"model  {info.model}, {dtypes}, up to {info.max_model_len} tokens a request")
    console.print(f"HTTP   http://{endpoints.http}/v1")
    console.print(f"gRPC   {endpoints.grpc}")
    console.print(f"admin  {endpoints.admin}")
    console.print(f"name   {cluster.name}")
    console.print(f"logs   {cluster.folders.logs}")
    console.print(f"try    {first_request(reachable(endpoints.grpc), chat=info.has_chat_template)}")
    console.print("ready; Ctrl-C stops it")


def first_request(address: str, *, chat: bool) -> str:
    """Return a command that sends a first request. chat: the model has a chat template. A model without one goes on with a
    text."""
    prompt = "--chat 'Why is the sky blue?'" if chat else "'The sky is blue because'"
    return f"pdserve generate --address {address} {prompt}"
