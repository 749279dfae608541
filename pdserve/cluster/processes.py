"""Processes by their place in /proc: finding ours, waiting for their end, ending what stays.

A process is known by (pid, start time), so a number that the kernel hands out again is never mistaken for ours.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
POLL_S = 0.02


@dataclass(frozen=True, slots=True, order=True)
class Process:
    pid: int
    start_ticks: int  # since boot
    parent: int

    @property
    def command(self) -> str:
        try:
            return (PROC / str(self.pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            return ""

    @property
    def alive(self) -> bool:
        """Whether this very process runs; a zombie does not."""
        now = _read(self.pid)
        return now is not None and now.start_ticks == self.start_ticks


def _read(pid: int) -> Process | None:
    """None when it is gone or a zombie."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()  # the name before may hold anything
    state, parent, start_ticks = fields[0], int(fields[1]), int(fields[19])
    return None if state in "ZX" else Process(pid, start_ticks, parent)


def running() -> list[Process]:
    """Every process that can be seen, parents' numbers included, in order of pid."""
    found = (_read(int(name)) for name in os.listdir(PROC) if name.isdigit())
    return sorted(process for process in found if process is not None)


def descendants(roots: Iterable[int]) -> list[Process]:
    """All children, grandchildren and so on of `roots`, without these."""
    children: dict[int, list[Process]] = {}
    for process in running():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = list(roots)
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child.pid)
    return found


def with_argument(text: str, root: int) -> list[Process]:
    """Descendants of `root` whose command line holds `text`, and all that these started."""
    named = [process for process in descendants([root]) if text in process.command]
    return sorted({*named, *descendants([process.pid for process in named])})


def wait_gone(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Wait until all have ended, at most `timeout_s`; those that still run."""
    deadline = time.monotonic() + timeout_s
    left = [process for process in processes if process.alive]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = [process for process in left if process.alive]
    return left


def kill(processes: Iterable[Process]) -> None:
    """SIGKILL to those that still run."""
    for process in processes:
        if process.alive:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # ended between the look and the signal


def age_s(pid: int) -> float:
    """Seconds since the process was started; 0 when it is gone."""
    process = _read(pid)
    if process is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - process.start_ticks / os.sysconf("SC_CLK_TCK")
