"""`pdserve scale`: order how many workers the pools have, and watch until they have them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import click

from pdserve.commands.failures import BAD_SETTING, FAILED, INTERRUPTED, one_line_errors, report
from pdserve.commands.requests import admin_options

if TYPE_CHECKING:
    from rich.console import Console

    from pdserve.client import AdminClient
    from pdserve.rpc.v1 import inference_pb2

POOLS: Final = ("prefill", "decode")
LOOK_S: Final = 0.5
SILENT_S: Final = 10.0  # the router then takes no order either: an actuator polls once a second
MOST_WORKERS: Final = 1_000_000  # the router takes no larger number


@click.command(short_help="Order the sizes of the pools.")
@click.argument("sizes", nargs=-1, metavar="[prefill=N] [decode=N]")
@click.option("--auto", is_flag=True, help="Let the planner decide the sizes again.")
@click.option("--no-wait", is_flag=True, help="Return as soon as the order is taken or refused.")
@admin_options
@one_line_errors
def scale(sizes: tuple[str, ...], auto: bool, no_wait: bool, address: str, cluster_token: str) -> int:
    """Let the pools have so many workers from now on, such as `pdserve scale prefill=3 decode=2`.

    A pool that is not named keeps its size. The planner, if it decided so far, decides no more until `--auto`. The command ends
    when the sizes are reached; Ctrl-C ends only the command.
    """
    from pdserve.client import AdminClient
    from pdserve.commands.console import make_console
    from pdserve.rpc.v1 import scaling_pb2

    if auto == bool(sizes):
        raise click.UsageError("give either sizes, such as prefill=3, or --auto")
    request = scaling_pb2.ScaleRequest(automatic=auto, **_parsed(sizes))
    console = make_console()
    with AdminClient(address, cluster_token) as client:
        number = client.scale(request)
        try:
            return _follow(console, client, number, wait=not no_wait and not auto)
        except KeyboardInterrupt:
            console.print("no longer watching; the order stays")
            return INTERRUPTED


def _parsed(sizes: tuple[str, ...]) -> dict[str, int]:
    """Return the sizes by pool. Raises `click.UsageError`."""
    parsed: dict[str, int] = {}
    for text in sizes:
        name, _, number = text.partition("=")
        if name not in POOLS:
            raise click.UsageError(f"{text!r}: there is no pool {name!r}; the pools are prefill and decode")
        if name in parsed:
            raise click.UsageError(f"{text!r}: {name} is given twice")
        if not number.isdecimal() or len(number) > 7 or int(number) > MOST_WORKERS:
            raise click.UsageError(f"{text!r}: write {name}=N, where N is a number of workers up to {MOST_WORKERS}")
        parsed[name] = int(number)
    return parsed


def _follow(console: Console, client: AdminClient, number: int, *, wait: bool) -> int:
    """Show the progress until the order is refused, replaced or reached. Return the exit status."""
    shown = ""
    with console.status("the order waits for `pdserve up`") as status:
        while True:
            state = client.cluster_state()
            now = state.scaling.report
            if state.scaling.age_s > SILENT_S:
                silent = f"{state.scaling.actuator} has not polled the router for {state.scaling.age_s:.0f} s"
                return report(f"{silent}; is `pdserve up` running?", FAILED)
            if now.order > number:
                return report(f"order {now.order} has replaced this one; `pdserve status` shows the sizes", FAILED)
            if now.order == number:
                if now.refused:
                    return report(now.refused, BAD_SETTING)
                line = _still(state)
                if not wait or not line:
                    console.print(_done(state, reached=not line))
                    return 0
                if console.is_terminal:
                    status.update(line)
                elif line != shown:
                    console.print(line)
                shown = line
            time.sleep(LOOK_S)


def _done(state: inference_pb2.GetClusterStateResponse, *, reached: bool) -> str:
    now = state.scaling.report
    if now.mode == "automatic":
        return "the planner decides the sizes; `pdserve plan --explain` tells why"
    return f"prefill {now.prefill}, decode {now.decode}: " + (
        "all take requests" if reached else "ordered; `pdserve status` shows who comes and leaves"
    )


def _still(state: inference_pb2.GetClusterStateResponse) -> str:
    """Say what is missing until the wanted sizes are reached. Empty: nothing is."""
    from pdserve.commands import tables

    now = state.scaling.report
    parts = []
    for name in POOLS:
        ready = sum(tables.role(worker.hello.role) == name and worker.ready for worker in state.workers)
        wanted = getattr(now, name)
        if ready != wanted:
            parts.append(f"{name} {ready} of {wanted}")
    parts += [f"{member.worker_id} {member.phase}" for member in now.members]
    return ", ".join(parts)
