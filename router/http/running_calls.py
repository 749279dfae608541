"""The running HTTP calls. A call is ended from outside when its client leaves or when the server closes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from pdserve.core.errors import Cancelled, PdserveError, Unavailable
from router.http.exchange import Exchange

T = TypeVar("T")


class RunningCalls:
    """The calls of one HTTP server, which owns this. It cancels work that is to end from outside."""

    def __init__(self) -> None:
        self._calls: dict[_Running, None] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def run(self, exchange: Exchange, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. Raises what it raises, `Cancelled` when the client leaves, `Unavailable` when the server
        closes. The whole body must have been received."""
        task = asyncio.current_task()
        assert task is not None
        running = _Running(task)
        unwatch = exchange.on_gone(running.client_left)
        self._calls[running] = None
        try:
            return await work
        except asyncio.CancelledError:
            if running.error is None or task.uncancel() > running.cancelling:
                raise  # somebody else cancelled the task
            raise running.error from None
        finally:
            running.ended = True
            unwatch()
            del self._calls[running]

    def cancel_all(self) -> None:
        """Cancel all running work."""
        for running in self._calls:
            running.end(Unavailable("the server is closing"))


class _Running:
    """The work of one call. Its task is cancelled once, and the error says why."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.cancelling = task.cancelling()
        self.error: PdserveError | None = None
        self.ended = False

    def client_left(self) -> None:
        self.end(Cancelled("the client left"))

    def end(self, error: PdserveError) -> None:
        if self.error is None and not self.ended:
            self.error = error
            self._task.cancel()
