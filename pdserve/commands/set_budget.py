"""`pdserve set-budget`: change how many tokens a step of running workers may have."""

from __future__ import annotations

import click

from pdserve.commands.failures import one_line_errors
from pdserve.commands.requests import UINT32, admin_options


@click.command("set-budget")
@click.argument("tokens", type=UINT32)
@admin_options
@click.option("--worker", "workers", metavar="ID", multiple=True, help="Tell this worker; may be repeated.")
@click.option("--pool", type=click.Choice(["prefill", "decode"]), help="Tell all workers of this pool that are linked now.")
@one_line_errors
def set_budget(tokens: int, address: str, cluster_token: str, workers: tuple[str, ...], pool: str | None) -> int:
    """Let each step have at most TOKENS tokens, of decodes and prompts together (`max_num_batched_tokens`).

    A smaller number makes the gaps between tokens beside a prompt shorter and the prompt slower; it changes no output. It lasts
    until the worker restarts, and is at most what the worker was started with.
    """
    from pdserve.client import AdminClient
    from pdserve.commands.console import make_console
    from pdserve.rpc.v1 import common_pb2

    if bool(workers) == bool(pool):
        raise click.UsageError("give either --worker or --pool")
    roles = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
    role = roles[pool] if pool else common_pb2.ROLE_UNSPECIFIED
    with AdminClient(address, cluster_token) as client:
        told = client.set_budget(workers, role, tokens)
    make_console().print(f"{', '.join(told)}: at most {tokens} tokens a step until the next restart")
    return 0
