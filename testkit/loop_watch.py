"""A watch over an event loop: how long each of its callbacks holds it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class LoopWatch:
    """The callbacks that held the loop the longest, by what they ran."""

    held_s: dict[str, float] = field(default_factory=dict)
    """The longest time of each callback, in seconds of its thread's CPU time."""

    @property
    def longest(self) -> tuple[float, str]:
        """The longest time, and what ran then."""
        return max(((held_s, name) for name, held_s in self.held_s.items()), default=(0.0, ""))


@contextmanager
def watched_loop() -> Iterator[LoopWatch]:
    """Measure each callback that a loop of asyncio runs in this thread until the block ends.

    The measure is the CPU time of the thread, so a busy machine changes little. It does not see what a callback waits for.
    Objects that are there before are frozen, as in a router: the garbage collector would otherwise walk over all that the
    other tests have loaded.
    """
    watch, thread, run = LoopWatch(), threading.get_ident(), asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        if threading.get_ident() != thread:
            run(handle)
            return
        name = _name(handle)
        began_s = time.thread_time()
        run(handle)
        took_s = time.thread_time() - began_s
        if took_s > watch.held_s.get(name, 0.0):
            watch.held_s[name] = took_s

    gc.collect()
    gc.freeze()
    asyncio.Handle._run = measured  # type: ignore[method-assign, assignment]
    try:
        yield watch
    finally:
        asyncio.Handle._run = run  # type: ignore[method-assign]
        gc.unfreeze()


def _name(handle: asyncio.Handle) -> str:
    """Return what a handle runs: the coroutine of a task, or a function."""
    callback = handle._callback  # type: ignore[attr-defined]
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        return getattr(task.get_coro(), "__qualname__", "") or repr(task.get_coro())
    return getattr(callback, "__qualname__", None) or repr(callback)
