"""`make bench-deaths`: kill one part of a cluster after the other under load, and write the clients' results into the page.

Each row has its own cluster: the tiny model, the default settings, two workers of each role, streams that run all the
time, and a short request four times a second. A part is killed, and the cluster is watched for a fixed time. A row shows the
failures of its version as they were seen.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.claims.setup import commit, describe_machine
from bench.deaths.clients import Clients
from bench.deaths.cluster import DyingCluster
from bench.deaths.table import Death, placed, row, table

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "when-things-die.md"
WARM_S: Final = 3.0
STREAMS_S: Final = 30.0
PAUSE_S: Final = 5.0  # until somebody notices that `pdserve up` has died
Victim = Callable[[DyingCluster], int | None]
"""Function that returns the process to kill. None: there is no such process."""
Sequel = Callable[[DyingCluster], Coroutine[Any, Any, str]]
"""Function that does the rest, and returns a note for the table; empty: there is no note."""


async def _nothing(_: DyingCluster) -> str:
    return ""


async def _up_again(cluster: DyingCluster) -> str:
    await asyncio.sleep(PAUSE_S)
    began_s = time.monotonic()
    cluster.start()
    if not await cluster.ready():
        return f"the next `pdserve up`, {PAUSE_S:g} s later, did not become ready: {cluster.said()}"
    return f"the next `pdserve up`, {PAUSE_S:g} s later, was ready after {time.monotonic() - began_s:.1f} s"


async def _cut(cluster: DyingCluster) -> str:
    return f"{cluster.relay.cut()} connections broken"


@dataclass(frozen=True, slots=True)
class Case:
    """One death: its name in the table, the time for which the cluster is watched after it, and the way to cause it."""

    what: str
    window_s: float
    victim: Victim | None = None
    signal: int = signal.SIGKILL
    sequel: Sequel = _nothing


CASES: Final = {
    "prefill": Case("a prefill worker (SIGKILL)", 20.0, lambda cluster: cluster.pids().get("prefill-0")),
    "decode": Case("a decode worker (SIGKILL)", 20.0, lambda cluster: cluster.pids().get("decode-0")),
    "router": Case("the router (SIGKILL)", 20.0, DyingCluster.router_pid),
    "hung-router": Case("the router hangs (SIGSTOP)", 60.0, DyingCluster.router_pid, signal.SIGSTOP),
    "up": Case("`pdserve up` (SIGKILL)", 20.0, DyingCluster.up_pid),
    "up-again": Case("`pdserve up` (SIGKILL), and it is started again", 40.0, DyingCluster.up_pid, sequel=_up_again),
    "ray": Case("the head of the private Ray (SIGKILL)", 75.0, DyingCluster.ray_head),
    "links": Case("all links between router and workers, for a moment", 20.0, sequel=_cut),
}


async def measure(case: Case, args: argparse.Namespace) -> Death:
    """Start a cluster, kill a part of it under load, and return the observations."""
    cluster = DyingCluster(args.prefill, args.decode)
    clients = Clients(cluster.address, args.streams, args.output_tokens)
    try:
        await cluster.relay.start()
        cluster.start()
        if not await cluster.ready():
            raise SystemExit(f"the cluster did not become ready: {cluster.said()}")
        clients.start()
        await asyncio.sleep(WARM_S)
        before = await asyncio.to_thread(cluster.pids)
        pid = await asyncio.to_thread(case.victim, cluster) if case.victim else None
        await _until_streaming(clients, args.streams)
        since_s = time.monotonic()
        if pid is not None:
            os.kill(pid, case.signal)  # a stopped process is killed by `close`
        note = "there is no such process" if case.victim and pid is None else await case.sequel(cluster)
        await asyncio.sleep(max(0.0, since_s + case.window_s - time.monotonic()))
        spans, asks = clients.spans(since_s, time.monotonic()), clients.asked_since(since_s)
        after = await asyncio.to_thread(cluster.pids)
        after |= {name: old for name, old in before.items() if name not in after and cluster.lives(old)}
        return Death(case.what, tuple(spans), tuple(asks), before, after, case.window_s, note)
    finally:
        await clients.stop()
        await cluster.close()


async def _until_streaming(clients: Clients, count: int) -> None:
    """Wait until all streams run. Raises `SystemExit` when they do not in time."""
    until_s = time.monotonic() + STREAMS_S
    while clients.streaming() < count:
        if time.monotonic() > until_s:
            raise SystemExit(f"only {clients.streaming()} of {count} streams run after {STREAMS_S:g} s: {clients.errors()}")
        await asyncio.sleep(0.02)


def parse() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help=f"rows to measure, of {', '.join(CASES)}; all of them without any")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--output-tokens", type=int, default=1500)
    parser.add_argument("--write-docs", action="store_true", help="write the table into docs/when-things-die.md")
    return parser.parse_args()


def main() -> int:
    """Measure, and print or write the table."""
    args = parse()
    unknown = [name for name in args.only if name not in CASES]
    if unknown or (args.write_docs and args.only):
        print(f"unknown: {', '.join(unknown)}" if unknown else "--write-docs needs all rows", file=sys.stderr)
        return 2
    deaths = []
    for name in args.only or CASES:
        deaths.append(asyncio.run(measure(CASES[name], args)))
        print(" | ".join(row(deaths[-1])), flush=True)
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    text = table(deaths, describe_machine(), commit(), date, "make bench-deaths")
    if args.write_docs:
        DOCUMENT.write_text(placed(DOCUMENT.read_text(encoding="utf-8"), text), encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
