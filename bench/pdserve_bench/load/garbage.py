"""The garbage collector during a run: it works only while nothing is due, because a full collection stops the generator."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

IDLE_S: Final = 0.02
"""The shortest pause in which young objects are collected. A collection of `YOUNG` objects takes some 3 ms."""
YOUNG: Final = 50_000
MUST: Final = 2_000_000
"""So many objects are collected at once, due or not. They hold some 200 MiB."""


@contextmanager
def quiet_garbage() -> Iterator[None]:
    """Freeze what is there, and turn automatic collection off inside `with`."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def collect_if_idle(idle_s: float) -> None:
    """Collect young objects if there are many and nothing is due for `idle_s`, or if there are too many."""
    young = gc.get_count()[0]
    if young > MUST or (young > YOUNG and idle_s >= IDLE_S):
        gc.collect(0)
