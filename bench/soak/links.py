"""`make soak-links LINKS=500 MINUTES=10` holds links under four times the load that the cores can carry, and counts lost links.

Two links belong to a real prefill and a real decode worker of the tiny model. The other links belong to workers without
engines, many in a process, which speak through the real worker's end of a link. The router is a real process. Streams run all
the time, beside four spinning processes for each core. No process is killed, so no link may be lost: the exit status is 1 if a
link is lost. Streams that broke and were taken up again are counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc

from bench.claims.setup import commit
from pdserve.config import MIB, EngineConfig
from pdserve.rpc.v1 import admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from testkit import light_worker
from testkit.client import request
from testkit.load import Outcome, attempt
from testkit.processes import FRESH_S, ProcessCluster, State

DOCUMENT: Final = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
END: Final = "<!-- links end -->"
LOAD: Final = 4  # times what the cores can carry
REAL_LINKS: Final = 2
PROCESS_LINKS: Final = 50  # the links of one process
LOOK_S: Final = 2.0
START_TIMEOUT_S: Final = 180.0
PROMPT_TOKENS: Final = 24
OUTPUT_TOKENS: Final = 2000  # as the streams under which links were lost
SPIN: Final = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True:
    pass
"""


class LinkedCluster(ProcessCluster):
    """A router and `links` links to it, all on this machine, with the default settings."""

    def __init__(self, links: int) -> None:
        self.links = links
        engine = EngineConfig(model="tiny", dtype="float32", kv_cache_memory=64 * MIB, threads=1)
        if links == REAL_LINKS:
            super().__init__(engine)
            return
        processes = max(2, links // PROCESS_LINKS)
        names = ["prefill-0", *(f"decode-{number}" for number in range(processes - 1))]
        shares = [links // processes + (number < links % processes) for number in range(processes)]
        places = {name: light_worker.place(share) for name, share in zip(names, shares, strict=True)}
        super().__init__(engine, decode=processes - 1, places=places)

    def is_whole(self, state: State) -> bool:
        """Tell whether all workers are linked, ready and heard."""
        return sum(worker.ready and worker.heartbeat_age_s < FRESH_S for worker in state.workers) == self.links


@dataclass(slots=True)
class Seen:
    """The result of one soak."""

    links: int
    minutes: float
    lost: list[str] = field(default_factory=list)
    """The router's lines about links that ended."""
    taken_up: int = 0
    silence_s: float = 0.0
    """The longest time for which the router had no sign of life of a worker, of all looks at its state."""
    held_up_s: float = 0.0
    """The longest time for which the machine did not run a process of workers without engines, beyond two seconds."""
    load_average: float = 0.0
    streams: Counter[str] = field(default_factory=Counter)
    """Streams by their ends: `ok`, or the reason of the failure."""
    tokens: int = 0

    def row(self) -> str:
        """Return the row of the table in docs/reliability.md."""
        failed = sum(count for end, count in self.streams.items() if end != "ok")
        date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        cells = (
            f"{self.links}",
            f"{LOAD} x {cores()} cores, load average {self.load_average:.0f}",
            f"{self.minutes:g}",
            f"{len(self.lost)}",
            f"{self.taken_up}",
            f"{self.silence_s:.1f} s",
            f"{self.held_up_s:.1f} s" if self.links != REAL_LINKS else "not told",
            f"{self.streams['ok']}, {failed}",
            f"{self.tokens:,}",
            f"{commit()}, {date}",
        )
        return f"| {' | '.join(cells)} |"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def spinning() -> Iterator[None]:
    """Keep each core busy `LOAD` times over."""
    spinners = [subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.PIPE) for _ in range(LOAD * cores())]
    try:
        yield
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.communicate()


@contextlib.contextmanager
def streaming(address: str, count: int, seen: Seen) -> Iterator[None]:
    """Keep `count` streams running, from one client. Streams that run at the end are cancelled."""
    loop = asyncio.new_event_loop()

    async def client(stub: inference_pb2_grpc.InferenceStub, number: int) -> None:
        while True:
            prompt = [number % 256] * PROMPT_TOKENS
            outcome = Outcome()
            try:
                await attempt(stub, request(prompt, max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True), outcome)
                seen.streams["ok" if outcome.ok else outcome.reason or str(outcome.status)] += 1
            finally:
                seen.tokens += len(outcome.answer.ids)

    async def clients() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await asyncio.gather(*(client(stub, number) for number in range(count)))

    running = loop.create_task(clients())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait((running,))), name="clients")
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(running.cancel)
        thread.join()
        loop.close()
    if not running.cancelled():
        running.result()  # raises: clients do not end by themselves


def soak(cluster: LinkedCluster, minutes: float, streams: int) -> Seen:
    """Put the load on a cluster that is whole, watch it for the given minutes, and return what was seen."""
    seen = Seen(cluster.links, minutes)
    asked = inference_pb2.GetClusterStateRequest()
    with grpc.insecure_channel(cluster.admin) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        stub.GetClusterState(asked, timeout=START_TIMEOUT_S)  # a connection that proves itself too late is closed
        with spinning(), streaming(cluster.grpc, streams, seen):
            until_s = time.monotonic() + 60 * minutes
            while time.monotonic() < until_s:
                time.sleep(LOOK_S)
                state = stub.GetClusterState(asked, timeout=START_TIMEOUT_S)
                seen.silence_s = max([seen.silence_s, *(worker.heartbeat_age_s for worker in state.workers)])
                seen.load_average = os.getloadavg()[0]
    log = cluster.processes["router"].log().splitlines()
    seen.lost = [line for line in log if " ended: " in line]
    others = (process.log() for name, process in cluster.processes.items() if name != "router")
    held_up = (float(found) for text in others for found in re.findall(rf"{light_worker.HELD_UP}([\d.]+) s", text))
    seen.held_up_s = max(held_up, default=0.0)
    seen.taken_up = sum(" goes on with a new stream" in line for line in log)
    return seen


def placed(document: str, row: str) -> str:
    """Return the page with this row in place of the row with the same number of links, or below the other rows. Raises
    `ValueError` for a page without the table's end."""
    lines = document.splitlines(keepends=True)
    end = lines.index(f"{END}\n")
    key = row.split("|")[1]
    above = [line for line in lines[:end] if line.split("|")[1:2] != [key]]
    return "".join([*above, f"{row}\n", *lines[end:]])


def main() -> int:
    """Run the soak. Return 0 when no link was lost, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=int, default=REAL_LINKS)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--streams", type=int, default=80, help="streams that run at once")
    parser.add_argument("--write-docs", action="store_true", help="write the row into docs/reliability.md")
    args = parser.parse_args()
    cluster = LinkedCluster(args.links)
    with cluster:
        cluster.wait_whole(START_TIMEOUT_S)
        seen = soak(cluster, args.minutes, args.streams)
        for line in seen.lost:
            print(line)
        if seen.lost:
            print(cluster.logs())
    print(dict(seen.streams))
    print(seen.row())
    if args.write_docs:
        DOCUMENT.write_text(placed(DOCUMENT.read_text(encoding="utf-8"), seen.row()), encoding="utf-8")
    return 1 if seen.lost else 0


if __name__ == "__main__":
    sys.exit(main())
