"""The time of the router's loop: work that would hold it goes to a thread, and requests share its turns.

The thread does one piece of work at a time. A caller waits for its turn on the loop, and when it leaves, its work is dropped
with it. An executor would keep the work in its queue until the thread came to it, so clients that leave could make it hold any
number of requests.

Clients, their connections and their calls take turns by fair queueing, as waiting requests do (`router.core.turns`). The
size of a piece is known before it begins, so small ones may pass: the flow is next whose tag plus `PASSING` times its smallest
piece is lowest. Tags rise with service, so the work that passes a large piece is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pdserve.core.errors import Overloaded, Unavailable
from pdserve.core.ids import RequestId
from router.core.turns import Flows, Path

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


BUDGET_S: Final = 0.005
"""After this much of a turn, further requests wait for the next one. It is a tenth of what nobody may hold the loop for, and
25 requests of 0.2 ms fit into it. The request that begins last may take a few milliseconds more."""


class LoopBudget:
    """Counts the time since the first request of the present turn of the loop. One loop uses it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: float | None = None
        """The time at which the first request of this turn began. None: none has begun."""

    async def admit(self) -> None:
        """Return at once while the budget of this turn lasts, and otherwise in a later turn. Each turn admits one request at
        least, so all of them get on."""
        while self._began_s is not None and self._clock() - self._began_s >= BUDGET_S:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0)
        if self._began_s is None:
            self._began_s = self._clock()
            asyncio.get_running_loop().call_soon(self._end_turn)  # runs before what `admit` lets wait

    def _end_turn(self) -> None:
        self._began_s = None


LEVELS: Final = 3  # clients, connections, calls
PASSING: Final = 8
"""While 64 flows with equal pieces wait, the virtual time rises to 4.7 times their size (1 + 1/2 + ... + 1/64) before the last
one is served. At 8 times, a newcomer of a third of their size still passes all of them."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A piece of work."""

    path: Path
    """The names of its client, its connection and its call. Of a client that is not known, it is empty."""
    cost: int
    """Its size, such as the characters of its text."""

    @property
    def flows(self) -> Path:
        """The path, with a name for each level."""
        return (*self.path, *("",) * LEVELS)[:LEVELS]

    @property
    def name(self) -> RequestId:
        """The name under which flows count it."""
        return RequestId(str(id(self)))


class FairTurns:
    """The pieces that wait, at most `max_waiting`."""

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._flows = Flows()
        self._waiting: dict[Piece, None] = {}  # the oldest one is first

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, piece: Piece) -> Piece | None:
        """Let a piece wait. Return the piece that has to give way because too many wait, which may be the same one: the newest
        of the call that has most, on the connection that has most, of the client that has most. None: nobody gives way."""
        self._waiting[piece] = None
        self._flows.join(piece.flows, piece.name)
        if len(self._waiting) <= self._max_waiting:
            return None
        heaviest = self._first(reversed(self._waiting), sum, lambda tag, cost: -cost)
        self.remove(heaviest)
        return heaviest

    def remove(self, piece: Piece) -> None:
        """Forget a piece. Nothing happens if it does not wait."""
        if piece in self._waiting:
            del self._waiting[piece]
            self._flows.leave(piece.flows, piece.name)

    def next(self) -> Piece | None:
        """Take the piece whose turn it is. None: nothing waits."""
        if not self._waiting:
            return None
        piece = self._first(self._waiting, min, lambda tag, cost: tag + PASSING * cost)
        self._flows.serve(piece.flows, piece.cost, now_s=0.0)
        self.remove(piece)
        return piece

    def _first(self, order: Iterable[Piece], joined: Callable[[list[int]], int], key: Callable[[float, int], float]) -> Piece:
        """Return the first piece of the chosen call. On each level, the flow with the lowest key is chosen, which is made of
        its tag and of the costs of its pieces as they are joined. Of equal flows, that of the first piece is chosen."""
        pieces, parent = list(order), self._flows.root
        for level in range(LEVELS):
            below: dict[str, list[Piece]] = {}
            for piece in pieces:
                below.setdefault(piece.flows[level], []).append(piece)
            flow = parent.below
            chosen = min(below, key=lambda name: key(flow[name].tag, joined([piece.cost for piece in below[name]])))
            pieces, parent = below[chosen], flow[chosen]
        return pieces[0]
