"""`pdserve set-budget`: change how many tokens and sequences a step of running workers may have."""

from __future__ import annotations

import click

from pdserve.commands.failures import one_line_errors
from pdserve.commands.requests import admin_options
from pdserve.commands.settings import UINT32, Whole


@click.command("set-budget", short_help="Limit the tokens and sequences of each step.")
@click.argument("tokens", type=UINT32, required=False)
@admin_options
@click.option("--worker", "workers", metavar="ID", multiple=True, help="Tell this worker; may be repeated.")
@click.option("--pool", type=click.Choice(["prefill", "decode"]), help="Tell all workers of this pool that are linked now.")
@click.option("--max-num-seqs", type=Whole(32, least=1), help="Let at most this number of sequences run.")
@one_line_errors
def set_budget(
    tokens: int | None,
    address: str,
    cluster_token: str,
    workers: tuple[str, ...],
    pool: str | None,
    max_num_seqs: int | None,
) -> int:
    """Let each step have at most TOKENS tokens, of decodes and prompts together (`max_num_batched_tokens`).

    A smaller number makes the gaps between tokens beside a prompt shorter and the prompt slower; it changes no output. With a
    smaller --max-num-seqs more requests wait, and those that run go faster; sequences that run already go on. Both last until
    the worker restarts or changes its role, and are at most the larger limits of both roles, for which it has memory.
    """
    from pdserve.client import AdminClient
    from pdserve.commands.console import make_console
    from pdserve.rpc.v1 import common_pb2

    if bool(workers) == bool(pool):
        raise click.UsageError("give either --worker or --pool")
    if tokens is None and max_num_seqs is None:
        raise click.UsageError("give TOKENS, --max-num-seqs, or both")
    if tokens == 0:
        raise click.UsageError("TOKENS: 0 is below 1")
    roles = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
    role = roles[pool] if pool else common_pb2.ROLE_UNSPECIFIED
    with AdminClient(address, cluster_token) as client:
        told = client.set_budget(workers, role, tokens or 0, max_num_seqs=max_num_seqs or 0)
    said = [f"{tokens} tokens a step"] if tokens else []
    said += [f"{max_num_seqs} sequences"] if max_num_seqs else []
    make_console().print(f"{', '.join(told)}: at most {' and '.join(said)} until the next restart")
    return 0
