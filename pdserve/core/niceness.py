"""The warning about a worker whose process yields to others. A worker's log, `pdserve up` and `pdserve status` give it."""

from __future__ import annotations

from collections.abc import Sequence


def niced(worker_ids: Sequence[str], niceness: int) -> str:
    """Return the warning, which says what to do. Ray gives its workers a niceness of 15: the kernel then gives an ordinary
    process 28 times the share of a core (weights 1024 and 36 of Linux's scheduler)."""
    return (
        f"{', '.join(worker_ids)}: niceness {niceness}, so ordinary processes of the machine take the cores first. "
        "Start Ray's nodes with RAY_worker_niceness=0 in the environment of `ray start`"
    )
