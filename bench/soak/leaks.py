"""What must be nothing after a soak: blocks that are not free, processes that have grown, complaints in the logs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from testkit.footprint import Footprint, footprint
from testkit.processes import ProcessCluster, is_empty

EMPTY_TIMEOUT_S: Final = 60.0
SETTLED_S: Final = 20.0  # a process this old has imported, loaded and served
GROWTH_BYTES: Final = 48 << 20  # of a process that went on serving: allocators keep what a peak needed
GROWTH_FDS: Final = 16  # connections to members that come and go
GROWTH_THREADS: Final = 8  # pools that grow to their bound

COMPLAINTS: Final = (  # what asyncio says of tasks that were lost, and what we say of our own bugs
    "Task was destroyed but it is pending",
    "exception was never retrieved",
    "was never awaited",
    "the books of the core disagree",
    "IllegalTransition",
    "InternalBug",
)


@dataclass(slots=True)
class _Seen:
    name: str
    began_s: float
    settled: Footprint | None = None
    last: Footprint | None = None
    last_s: float = 0.0


class Growth:
    """Watches every process that lives long enough, also those that a fault ends. `look` now and then, `found` at the end."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self._cluster = cluster
        self._seen: dict[tuple[str, int], _Seen] = {}

    def look(self) -> None:
        now_s = time.monotonic()
        for name, process in list(self._cluster.processes.items()):
            seen = self._seen.setdefault((name, process.popen.pid), _Seen(name, now_s))
            now = _footprint(process.popen.pid) if now_s - seen.began_s >= SETTLED_S and process.alive else None
            if now is not None:
                seen.settled = seen.settled or now
                seen.last, seen.last_s = now, now_s

    def rows(self) -> list[tuple[str, Footprint, Footprint]]:
        """(name, settled, last seen) of the process of each member that was watched for longest."""
        by_age = sorted(self._watched(), key=lambda seen: seen.last_s - seen.began_s)
        longest = {seen.name: seen for seen in by_age}
        return [
            (f"{name}, {seen.last_s - seen.began_s:.0f} s old", seen.settled, seen.last)
            for name, seen in sorted(longest.items())
            if seen.settled is not None and seen.last is not None
        ]

    def found(self) -> list[str]:
        return [
            f"{seen.name} grew from {was} to {now}"
            for seen in self._watched()
            if (was := seen.settled) is not None and (now := seen.last) is not None and _has_grown(was, now)
        ]

    @property
    def num_watched(self) -> int:
        return len(self._watched())

    def _watched(self) -> list[_Seen]:
        return [seen for seen in self._seen.values() if seen.last is not None]


def _has_grown(was: Footprint, now: Footprint) -> bool:
    return (
        now.rss_bytes - was.rss_bytes > GROWTH_BYTES
        or now.fds - was.fds > GROWTH_FDS
        or now.threads - was.threads > GROWTH_THREADS
    )


def _footprint(pid: int) -> Footprint | None:
    try:
        return footprint(pid)
    except psutil.NoSuchProcess:
        return None  # it has just ended


def complaints(folder: Path) -> list[str]:
    """The first line of each kind, of each member's log."""
    found = []
    for path in sorted(folder.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        for words in COMPLAINTS:
            said = [line for line in lines if words in line]
            if said:
                found.append(f"{path.stem} said {len(said)} times: {said[0]}")
    return found


def block_leaks(cluster: ProcessCluster) -> list[str]:
    """Workers that still hold something after the last request has ended."""
    try:
        cluster.assert_empty(EMPTY_TIMEOUT_S)
    except TimeoutError:
        state = cluster.state()
        if state.queued_requests or state.running_requests:
            return [f"the router still has {state.queued_requests} queued, {state.running_requests} running requests"]
        return [
            f"{w.worker_id}: {w.blocks}, leases {w.leases_held}, sequences {w.running_sequences}".replace("\n", " ")
            for w in state.workers
            if w.blocks.free + w.blocks.cached != w.blocks.total or w.leases_held or w.running_sequences
        ] or [f"not empty: {is_empty(state)=}"]
    return []
