"""The running HTTP calls. A call is ended from outside when its client leaves or when the server closes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from pdserve.core.errors import Cancelled, Unavailable

T = TypeVar("T")


class RunningCalls:
    """The calls of one HTTP server, which owns this. It cancels work that is to end from outside."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def run(self, receive: Receive, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. Raises what it raises, `Cancelled` when the client leaves, `Unavailable` when the server
        closes.

        `receive` must have delivered the whole body. Its next message says that the client is gone, and comes also while
        nothing is being sent.
        """
        task = asyncio.create_task(work)
        watch = asyncio.create_task(_gone(receive))
        self._tasks.add(task)
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Cancelled("the client left")
            if task.cancelled():
                raise Unavailable("the server is closing")
            return task.result()
        finally:
            self._tasks.discard(task)
            task.cancel()
            watch.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    def cancel_all(self) -> None:
        """Cancel all running work."""
        for task in self._tasks:
            task.cancel()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
