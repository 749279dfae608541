"""A thread for work that would hold the loop. It does one piece of work at a time.

A caller waits for its turn on the loop, and when it leaves, its work is dropped with it. An executor would keep the work in its
queue until the thread came to it, so clients that leave could make it hold any number of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from pdserve.core.errors import Overloaded, Unavailable
from router.core.turns import Path
from router.service.loop_time.fair_turns import FairTurns, Piece

T = TypeVar("T")


class SerialThread:
    """A thread that is made, called and closed on one loop. It owns the thread; `close` it."""

    def __init__(self, name: str, max_waiting: int) -> None:
        """Make the thread. It lets at most `max_waiting` callers wait for their turns."""
        self._name = name
        self._max_waiting = max_waiting
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._turns = FairTurns(max_waiting)
        self._asked: dict[Piece, tuple[Callable[[], Any], asyncio.Future[Any]]] = {}
        """The work of each caller that waits for its turn, and the future for its result."""
        self._running = False
        self._closed = False

    async def run(self, work: Callable[[], T], client: Path = (), cost: int = 1) -> T:
        """Run `work` in the thread and return its result. Clients take turns (`fair_turns`); `cost` is the size of the work.
        Raises what `work` raises, `Overloaded` where too many wait and this client has most of them, and `Unavailable` after
        `close`.

        Work that has begun goes on when its caller is cancelled. The next call waits for its end.
        """
        if self._closed:
            raise Unavailable("the router is closing")
        piece, result = Piece(client, cost), asyncio.get_running_loop().create_future()
        self._asked[piece] = work, result
        del work  # what waits is held in one place, from which it is dropped when its caller leaves
        refused = self._turns.add(piece)
        if refused is not None:
            full = f"{self._max_waiting} pieces of work wait for the thread {self._name!r}, and this client has most of them"
            _fail(self._asked.pop(refused)[1], Overloaded(full, retry_after_s=1.0))
        if not self._running:
            self._next()
        try:
            done: T = await result
            return done
        finally:
            self._turns.remove(piece)
            self._asked.pop(piece, None)

    def close(self) -> None:
        """Close without waiting. Running work goes on, and callers that wait get `Unavailable`."""
        self._closed = True
        for _, result in self._asked.values():
            _fail(result, Unavailable("the router is closing"))
        self._thread.shutdown(wait=False)

    def _next(self) -> None:
        """Begin the work whose turn it is."""
        piece = None if self._closed else self._turns.next()
        self._running = piece is not None
        if piece is not None:
            work, result = self._asked.pop(piece)
            loop = asyncio.get_running_loop()
            self._thread.submit(work).add_done_callback(lambda done: self._hand_over(loop, done, result))

    def _hand_over(self, loop: asyncio.AbstractEventLoop, done: Future[Any], result: asyncio.Future[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, so nobody waits
            loop.call_soon_threadsafe(self._ended, done, result)

    def _ended(self, done: Future[Any], result: asyncio.Future[Any]) -> None:
        self._next()
        if (error := done.exception()) is not None:
            _fail(result, error)
        elif not result.done():
            result.set_result(done.result())


def _fail(result: asyncio.Future[Any], error: BaseException) -> None:
    if not result.done():  # else its caller has left
        result.set_exception(error)
