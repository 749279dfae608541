"""What a process holds of the machine: memory, file descriptors, threads. Read from /proc, so for Linux only."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Footprint:
    rss_bytes: int
    fds: int
    threads: int


def footprint(pid: int) -> Footprint:
    """Raises OSError when the process has gone or has ended and waits for its parent."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "VmRSS" not in fields:
        raise ProcessLookupError(f"process {pid} has ended")
    return Footprint(
        rss_bytes=int(fields["VmRSS"].split()[0]) * 1024,
        fds=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(fields["Threads"]),
    )
