"""`pdserve drain`: take workers out of service without losing anything, and watch them leave."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from pdserve.commands.failures import FAILED, INTERRUPTED, one_line_errors, report
from pdserve.commands.requests import admin_options

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve.client import PrintedStream
    from pdserve.rpc.v1 import inference_pb2


@click.command(short_help="Let a worker finish what it has, and leave.")
@click.argument("worker", required=False)
@admin_options
@click.option(
    "--on-host", metavar="HOST", help="Drain all workers at this address instead of WORKER; no worker there is no error."
)
@click.option("--force", is_flag=True, help="Drain also the last worker of its role, after which nobody is served.")
@click.option("--no-wait", is_flag=True, help="Return as soon as the drain has begun.")
@one_line_errors
def drain(worker: str | None, address: str, cluster_token: str, on_host: str | None, force: bool, no_wait: bool) -> int:
    """Drain WORKER: it takes no new requests, those that it has move to other workers or end, and it leaves.

    The last worker of a role leaves only with --force. --on-host forces as well: a host that leaves asks nobody.

    The command ends when the worker has left. Ctrl-C ends only the command; the worker goes on draining.
    """
    from pdserve.client import AdminClient
    from pdserve.commands.console import make_console
    from pdserve.commands.scaling.leaving_host import drain_host

    if (worker is None) == (on_host is None):
        raise click.UsageError("give either WORKER or --on-host")
    console = make_console()
    try:
        if on_host is not None:
            drain_host(
                address, cluster_token, on_host, lambda name: console.print(f"{name} has drained and left"), wait=not no_wait
            )
            return 0
        assert worker is not None
        with AdminClient(address, cluster_token) as client:
            call = client.drain(worker, force=force)
            left = _begun(console, worker, call) if no_wait else _left(console, worker, call)
    except KeyboardInterrupt:
        console.print("no longer watching; the drain goes on")
        return INTERRUPTED
    return 0 if left else FAILED


def _begun(console: Console, worker: str, call: PrintedStream[inference_pb2.DrainProgress]) -> bool:
    """Wait for the first message of progress: the router has then told the worker. Return True."""
    next(iter(call))
    call.cancel()
    console.print(f"{worker} is draining; `pdserve status` shows it")
    return True


def _left(console: Console, worker: str, call: PrintedStream[inference_pb2.DrainProgress]) -> bool:
    """Show the progress until the worker has left. False: the stream ended before."""
    last = watch(console, worker, call)
    if last is None:
        report(f"the router stopped reporting how {worker} drains; `pdserve status` shows it", FAILED)
        return False
    console.print(f"{worker} has drained and left after {last.elapsed_s:.1f} s")
    return True


def watch(
    console: Console, worker: str, call: PrintedStream[inference_pb2.DrainProgress]
) -> inference_pb2.DrainProgress | None:
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
