"""`pdserve flip`: let a worker change into the other pool without loading its weights again, and show that it did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pdserve.commands.failures import FAILED, INTERRUPTED, one_line_errors, report
from pdserve.commands.requests import admin_options
from pdserve.commands.scaling.drain import watch
from pdserve.core.errors import UnknownWorker

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve.client import AdminClient
    from pdserve.rpc.v1 import inference_pb2


@click.command(short_help="Let a worker join the other pool.")
@click.argument("worker")
@admin_options
@click.option("--to", "role", type=click.Choice(["prefill", "decode"]), help="The new role (default: the other one).")
@one_line_errors
def flip(worker: str, address: str, cluster_token: str, role: str | None) -> int:
    """Let WORKER change its role: it takes no new requests, finishes those that it has, and joins the other pool.

    The process keeps its weights; with vLLM, its server starts again and loads them. The command ends when the worker has
    joined in its new role. Ctrl-C ends only the command.
    """
    from pdserve.client import AdminClient
    from pdserve.commands import tables
    from pdserve.commands.console import make_console
    from pdserve.rpc.v1 import common_pb2

    console = make_console()
    with AdminClient(address, cluster_token) as client:
        before = _find(client, worker)
        now = tables.role(before.hello.role)
        wanted = role or ("decode" if now == "prefill" else "prefill")
        number = common_pb2.ROLE_DECODE if wanted == "decode" else common_pb2.ROLE_PREFILL
        call = client.flip(worker, number, incarnation=before.hello.incarnation)
        try:
            last = watch(console, worker, call)
        except KeyboardInterrupt:
            console.print("no longer watching; the flip goes on")
            return INTERRUPTED
        if last is None:
            return report(f"the router stopped reporting how {worker} flips; `pdserve status` shows it", FAILED)
        return _prove(console, before, _find(client, worker), wanted, last.incarnation)


def _find(client: AdminClient, worker: str) -> inference_pb2.WorkerState:
    """Return the state of a worker. Raises `UnknownWorker`."""
    workers = client.cluster_state().workers
    for state in workers:
        if state.hello.worker_id == worker:
            return state
    known = ", ".join(state.hello.worker_id for state in workers) or "none"
    raise UnknownWorker(f"{worker!r} is not linked to this router; linked: {known}", field="worker_id")


def _prove(
    console: Console, before: inference_pb2.WorkerState, after: inference_pb2.WorkerState, role: str, incarnation: int
) -> int:
    """Show what proves that the process has stayed. Return the exit status: a process that was started anew, or has changed its
    role again, is a failure."""
    old, new = before.hello, after.hello
    if (new.incarnation, new.pid) != (incarnation, old.pid) or new.flips <= old.flips:
        return report(f"{new.worker_id} was started anew after its flip: pid {old.pid} -> {new.pid}", FAILED)
    kept = f"its server of {new.engine} started again" if new.engine else "weights kept"
    console.print(
        f"{new.worker_id} is a {role} worker now: same process (pid {new.pid}), incarnation {_short(old.incarnation)} -> "
        f"{_short(new.incarnation)}, {kept} (flip {new.flips} of this process)",
        soft_wrap=True,
    )
    return 0


def _short(incarnation: int) -> str:
    return f"{incarnation:016x}"[:8]
