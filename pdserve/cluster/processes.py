"""Processes that we started, and their descendants: find them, wait for their end, kill those that stay.

A `psutil.Process` is known by pid and start time, so a pid that the kernel uses again is never mistaken for ours. A zombie
counts as ended here. `psutil.wait_procs` is not used, since it would take the exit status of our own children away from the
code that started them.
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
    """Tell whether this very process runs. A zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def command(process: psutil.Process) -> str:
    """Return the command line, joined by spaces; empty when the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def descendants(root: int) -> list[psutil.Process]:
    """Return all children, grandchildren and so on of `root` that run, without `root` itself."""
    try:
        found = psutil.Process(root).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if alive(process)]


def with_argument(text: str, root: int) -> list[psutil.Process]:
    """Return the descendants of `root` whose command line holds `text`, and all processes that these started."""
    named = [process for process in descendants(root) if text in command(process)]
    started = [process for each in named for process in descendants(each.pid)]
    return sorted({*named, *started}, key=lambda process: process.pid)


def wait_gone(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Wait until all have ended, for at most `timeout_s`. Return those that still run."""
    deadline = time.monotonic() + timeout_s
    left = [process for process in processes if alive(process)]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = [process for process in left if alive(process)]
    return left


def kill(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to those that still run."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
            process.kill()


def age_s(pid: int) -> float:
    """Return the seconds since the process was started; 0 when it is gone.

    psutil's `Process.create_time` can be wrong by a second: it adds to the time of the boot, which the kernel tells in
    whole seconds.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return 0.0
    start_ticks = int(stat.rpartition(")")[2].split()[19])  # the name of the program, before `)`, may hold any character
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
