"""What a process holds of the machine: memory, file descriptors, threads."""

from __future__ import annotations

from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Footprint:
    rss_bytes: int
    fds: int
    threads: int


def footprint(pid: int) -> Footprint:
    """Raises `psutil.NoSuchProcess` when the process has gone or has ended and waits for its parent."""
    process = psutil.Process(pid)
    with process.oneshot():
        if process.status() == psutil.STATUS_ZOMBIE:
            raise psutil.ZombieProcess(pid)
        return Footprint(process.memory_info().rss, process.num_fds(), process.num_threads())
