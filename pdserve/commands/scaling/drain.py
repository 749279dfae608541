"""`pdserve drain`: take workers out of service without losing anything, and watch them leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pdserve.commands.failures import FAILED, INTERRUPTED, one_line_errors, report
from pdserve.commands.requests import admin_options

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve.client import AdminClient, Stream
    from pdserve.rpc.v1 import inference_pb2


@click.command()
@click.argument("worker", required=False)
@admin_options
@click.option(
    "--on-host", metavar="HOST", help="Drain all workers at this address instead of WORKER; no worker there is no error."
)
@click.option("--no-wait", is_flag=True, help="Return as soon as the drain has begun.")
@one_line_errors
def drain(worker: str | None, address: str, cluster_token: str, on_host: str | None, no_wait: bool) -> int:
    """Drain WORKER: it takes no new requests, finishes those that it has, hands over the KV that it lent, and leaves.

    The command ends when the worker has left. Ctrl-C ends only the command; the worker goes on draining.
    """
    from pdserve.client import AdminClient
    from pdserve.commands.console import make_console

    if (worker is None) == (on_host is None):
        raise click.UsageError("give either WORKER or --on-host")
    console = make_console()
    with AdminClient(address, cluster_token) as client:
        names = [worker] if worker is not None else _on_host(client, on_host or "")
        calls = {name: client.drain(name) for name in names}  # all drain together, and are watched one after the other
        try:
            left = [_begun(console, name, call) if no_wait else _left(console, name, call) for name, call in calls.items()]
        except KeyboardInterrupt:
            console.print("no longer watching; the drain goes on")
            return INTERRUPTED
    return 0 if all(left) else FAILED


def _on_host(client: AdminClient, host: str) -> list[str]:
    workers = client.cluster_state().workers
    return [worker.hello.worker_id for worker in workers if worker.hello.address.rpartition(":")[0].strip("[]") == host]


def _begun(console: Console, worker: str, call: Stream[inference_pb2.DrainProgress]) -> bool:
    """Wait for the first message of progress: the router has then told the worker. Return True."""
    next(iter(call))
    call.cancel()
    console.print(f"{worker} is draining; `pdserve status` shows it")
    return True


def _left(console: Console, worker: str, call: Stream[inference_pb2.DrainProgress]) -> bool:
    """Show the progress until the worker has left. False: the stream ended before."""
    last = watch(console, worker, call)
    if last is None:
        report(f"the router stopped reporting how {worker} drains; `pdserve status` shows it", FAILED)
        return False
    console.print(f"{worker} has drained and left after {last.elapsed_s:.1f} s")
    return True


def watch(console: Console, worker: str, call: Stream[inference_pb2.DrainProgress]) -> inference_pb2.DrainProgress | None:
    """Show the progress of a drain or a flip: one live line on a terminal, a line for each change elsewhere.

    Return the last message. None: the stream ended before it.
    """
    shown = ""
    with console.status(f"{worker}: draining") as status:
        for progress in call:
            if progress.done:
                return progress
            line = f"{worker}: {_still(progress)}"
            if console.is_terminal:
                status.update(f"{line} ({progress.elapsed_s:.0f} s)")
            elif line != shown:
                console.print(line)
            shown = line
    return None


def _still(progress: inference_pb2.DrainProgress) -> str:
    """Name the work for which the worker still waits."""
    parts = (
        (progress.requests_placed, "requests"),
        (progress.running_sequences, "sequences"),
        (progress.leases_held, "leases"),
        (progress.blocks_held, "blocks"),
    )
    return "waits for " + (", ".join(f"{count} {name}" for count, name in parts if count) or "its last clean-up")
