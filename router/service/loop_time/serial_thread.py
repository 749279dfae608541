"""A thread for work that would hold the loop. It does one piece of work at a time.

A caller waits for its turn on the loop, and when it leaves, its work is dropped with it. An executor would keep the work in its
queue until the thread came to it, so clients that leave could make it hold any number of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdserve.core.errors import Unavailable

T = TypeVar("T")


class SerialThread:
    """A thread that is made, called and closed on one loop. It owns the thread; `close` it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._turn = asyncio.Lock()
        self._closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread and return its result. Calls take turns in their order. Raises what `work` raises, and
        `Unavailable` after `close`.

        Work that has begun goes on when its caller is cancelled. The next call waits for its end.
        """
        await self._turn.acquire()
        if self._closed:
            self._turn.release()
            raise Unavailable("the router is closing")
        loop = asyncio.get_running_loop()
        running = self._thread.submit(work)
        running.add_done_callback(lambda _: self._pass_turn(loop))
        return await asyncio.wrap_future(running)

    def close(self) -> None:
        """Close without waiting. Running work goes on, and callers that wait get `Unavailable`."""
        self._closed = True
        self._thread.shutdown(wait=False)

    def _pass_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, so nobody waits
            loop.call_soon_threadsafe(self._turn.release)
