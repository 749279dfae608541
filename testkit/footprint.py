"""The memory, file descriptors and threads that a process uses."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources that one process uses at one moment."""

    rss_bytes: int
    fds: int
    threads: int


def footprint(pid: int) -> Footprint:
    """Return the footprint of a process. Raises `psutil.NoSuchProcess` when the process has gone, or has ended and waits for
    its parent."""
    process = psutil.Process(pid)
    with process.oneshot():
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.ZombieProcess(pid)
        return Footprint(process.memory_info().rss, process.num_fds(), process.num_threads())
