"""A thread for work that would hold the loop, one piece at a time.

Who waits for a turn waits on the loop, and takes what it brought along when it leaves. An executor would keep that in its
queue until the thread comes to it, so that clients who leave could make it hold any number of requests.
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
    """Made, called and closed on one loop. Owns its thread; `close` it."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._turn = asyncio.Lock()
        self._closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """In the thread, in the order of calls. Raises what `work` raises, `Unavailable` after `close`.

        Work that has begun goes on when its caller is cancelled, and the next one waits for its end.
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
        """At once. What runs goes on; who waits is told that nothing follows."""
        self._closed = True
        self._thread.shutdown(wait=False)

    def _pass_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(self._turn.release)
