"""Checks at the end of a soak: no block is held, no process has grown, and no log complains."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from testkit.footprint import Footprint, footprint
from testkit.processes import ProcessCluster, is_empty

EMPTY_TIMEOUT_S: Final = 60.0
SETTLED_S: Final = 20.0  # by this age a process has imported, loaded and served
GROWTH_BYTES: Final = 48 << 20  # no leak up to this: allocators keep the memory of a peak
GROWTH_FDS: Final = 16  # no leak up to this: connections to members that come and go
GROWTH_THREADS: Final = 8  # no leak up to this: thread pools grow to their bound

COMPLAINTS: Final = (  # words by which asyncio reports lost tasks, and pdserve its own bugs
    "Task was destroyed but it is pending",
    "exception was never retrieved",
    "was never awaited",
    "the books of the core disagree",
    "IllegalTransition",
    "InternalBug",
)


@dataclass(slots=True)
class _Seen:
    """One process, with its footprint when it had settled and its last footprint. Times are seconds of the monotonic clock."""

    name: str
    began_s: float
    settled: Footprint | None = None
    last: Footprint | None = None
    last_s: float = 0.0


class Growth:
    """Watches every process that lives long enough, also processes that a fault ends. Call `look` now and then, and `found` at
    the end.
    """

    def __init__(self, cluster: ProcessCluster, *, clients: int = 0) -> None:
        """`clients`: the number of clients that connect to the router at once. They leave their connections open when the load
        stops. A router that is killed under load was last seen with these connections."""
        self._cluster = cluster
        self._clients = clients
        self._seen: dict[tuple[str, int], _Seen] = {}

    def look(self) -> None:
        """Measure every process that has settled."""
        now_s = time.monotonic()
        for name, process in list(self._cluster.processes.items()):
            seen = self._seen.setdefault((name, process.popen.pid), _Seen(name, now_s))
            now = _footprint(process.popen.pid) if now_s - seen.began_s >= SETTLED_S and process.alive else None
            if now is not None:
                seen.settled = seen.settled or now
                seen.last, seen.last_s = now, now_s

    def rows(self) -> list[tuple[str, Footprint, Footprint]]:
        """Return (name and age, settled footprint, last footprint) of the process of each member that was watched for
        longest.
        """
        by_age = sorted(self._watched(), key=lambda seen: seen.last_s - seen.began_s)
        longest = {seen.name: seen for seen in by_age}
        return [
            (f"{name}, {seen.last_s - seen.began_s:.0f} s old", seen.settled, seen.last)
            for name, seen in sorted(longest.items())
            if seen.settled is not None and seen.last is not None
        ]

    def found(self) -> list[str]:
        """Return a line for each process that has grown beyond the limits."""
        return [
            f"{seen.name} grew from {was} to {now}"
            for seen in self._watched()
            if (was := seen.settled) is not None and (now := seen.last) is not None and self._has_grown(was, now)
        ]

    @property
    def num_watched(self) -> int:
        """Number of processes that were measured at least once."""
        return len(self._watched())

    def _watched(self) -> list[_Seen]:
        return [seen for seen in self._seen.values() if seen.last is not None]

    def _has_grown(self, was: Footprint, now: Footprint) -> bool:
        return (
            now.rss_bytes - was.rss_bytes > GROWTH_BYTES
            or now.fds - was.fds > GROWTH_FDS + self._clients
            or now.threads - was.threads > GROWTH_THREADS
        )


def _footprint(pid: int) -> Footprint | None:
    try:
        return footprint(pid)
    except psutil.NoSuchProcess:
        return None  # the process has just ended


def complaints(folder: Path) -> list[str]:
    """Return a line for each kind of complaint in each member's log: how often it occurs, and its first line."""
    found = []
    for path in sorted(folder.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        for words in COMPLAINTS:
            said = [line for line in lines if words in line]
            if said:
                found.append(f"{path.stem} said {len(said)} times: {said[0]}")
    return found


def block_leaks(cluster: ProcessCluster) -> list[str]:
    """Return a line for each worker that still holds blocks, leases or sequences 60 s after the last request has ended."""
    try:
        cluster.assert_empty(EMPTY_TIMEOUT_S)
    except TimeoutError:
        state = cluster.state()
        if state.queued_requests or state.running_requests:
            return [f"the router still has {state.queued_requests} queued, {state.running_requests} running requests"]
        return [
            f"{w.hello.worker_id}: {w.load.blocks}, leases {w.load.leases_held}, sequences {w.load.running_sequences}".replace(
                "\n", " "
            )
            for w in state.workers
            if w.load.blocks.free + w.load.blocks.cached != w.load.blocks.total
            or w.load.leases_held
            or w.load.running_sequences
        ] or [f"not empty: {is_empty(state)=}"]
    return []
