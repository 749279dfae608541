"""Processes that we started, and their descendants: finding them, waiting for their end, ending what stays.

A `psutil.Process` is known by pid and start time, so a number that the kernel hands out again is never mistaken for ours.
A zombie counts as ended here. It is not waited for with `psutil.wait_procs`, which would take the exit status of our own
children away from whoever started them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

POLL_S = 0.02


def alive(process: psutil.Process) -> bool:
    """Whether this very process runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def command(process: psutil.Process) -> str:
    """Its arguments, joined by spaces; empty when it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def descendants(root: int) -> list[psutil.Process]:
    """All children, grandchildren and so on of `root` that run, without itself."""
    try:
        found = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if alive(process)]


def with_argument(text: str, root: int) -> list[psutil.Process]:
    """Descendants of `root` whose command line holds `text`, and all that these started."""
    named = [process for process in descendants(root) if text in command(process)]
    started = [process for each in named for process in descendants(each.pid)]
    return sorted({*named, *started}, key=lambda process: process.pid)


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until all have ended, at most `timeout_s`; those that still run."""
    deadline = time.monotonic() + timeout_s
    left = [process for process in processes if alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = [process for process in left if alive(process)]
    return left


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to those that still run."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            process.kill()


def age_s(pid: int) -> float:
    """Seconds since the process was started; 0 when it is gone. `Process.create_time` can be a whole second off: it counts
    from the boot's time of day, which the kernel tells in seconds."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0.0
    start_ticks = int(stat.rpartition(")")[2].split()[19])  # the name before may hold anything
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
