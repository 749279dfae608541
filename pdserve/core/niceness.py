"""What is said of a worker whose process yields to others, wherever it is said: its log, `pdserve up`, `pdserve status`."""

from __future__ import annotations

from collections.abc import Sequence


def niced(worker_ids: Sequence[str], niceness: int) -> str:
    """One sentence with what to do. Ray gives its workers 15; the kernel then gives ordinary processes 28 times its share
    of a core (weights 1024 and 36 of Linux's scheduler)."""
    return (
        f"{', '.join(worker_ids)}: niceness {niceness}, so ordinary processes of the machine take the cores first. "
        "Start Ray's nodes with RAY_worker_niceness=0 in the environment of `ray start`"
    )
