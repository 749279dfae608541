"""The memory, file descriptors and threads that a process uses. They are read from /proc, so this needs Linux."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Footprint:
    """The resources that one process uses at one moment."""

    rss_bytes: int
    fds: int
    threads: int


def footprint(pid: int) -> Footprint:
    """Return the footprint of a process. Raises OSError when the process has gone, or has ended and waits for its parent."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    if "VmRSS" not in fields:
        raise ProcessLookupError(f"process {pid} has ended")
    return Footprint(
        rss_bytes=int(fields["VmRSS"].split()[0]) * 1024,
        fds=len(os.listdir(f"/proc/{pid}/fd")),
        threads=int(fields["Threads"]),
    )
