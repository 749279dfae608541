"""The order in which pieces of work get a thread that does one at a time. Pure.

Clients, their connections and their calls take turns by fair queueing, as waiting requests do (`router.core.turns`). The
size of a piece is known before it begins, so small ones may pass: the flow is next whose tag plus `PASSING` times its smallest
piece is lowest. Tags rise with service, so the work that passes a large piece is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from pdserve.core.ids import RequestId
from router.core.turns import Flows, Path

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
