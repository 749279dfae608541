"""Requests that wait for room on a decode worker, in the order of their turns.

A turn is the time at which the first token should leave, or the deadline where that is sooner, less `LEVEL_S` for each level of
priority. A request with a tight target overtakes others, and one of higher priority overtakes earlier ones, but a turn never
changes while time goes on. So only requests that came a bounded time later overtake, and no request waits for ever. A replay
counts as one level more.

Requests of one *kind* could be served by the same workers and need about as much room. When the first one of a kind finds no
room, no other one of this kind is asked: a worker with new room meets one request of each kind, however many wait. Requests
that no linked worker could serve are *parked*: they keep their turns, and nobody waits behind them. Siblings wait
*behind* their leader until its KV is there or it has ended: nobody waits for them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Final, NamedTuple

from pdserve.core.ids import RequestId
from pdserve.core.sampling import Placement
from router.core.live_request import LiveRequest
from router.core.registry import Turn

LEVEL_S: Final = 3.0
"""The seconds that one level of priority is worth. All two hundred levels outweigh the default deadline of 600 s."""
DEFAULT_TTFT_S: Final = 2.0
"""The target of a request whose class has none, as far as its turn is concerned: that of the built-in class "batch"."""


class Kind(NamedTuple):
    """The traits that requests share when the same workers could serve them."""

    decode_length: int  # max_model_len of the shortest decode workers that are long enough; 0: none are
    prefill_length: int  # the same for prefill workers
    asked: Placement
    short: bool  # the prompt is computed on the decode worker, where the settings decide
    size: int  # class of the room that they need, in quarters of a power of two


def size_of(tokens: int) -> int:
    """Return the class of so many tokens of KV. The largest number of a class is at most a fifth larger than the smallest."""
    return int(4 * math.log2(max(1, tokens)))


def turn_of(request: LiveRequest) -> Turn:
    """Return the turn of a request. It does not change while the request waits."""
    target_s = request.times.arrived_s + (request.slo.ttft_s or DEFAULT_TTFT_S)
    levels = request.spec.priority + request.replay
    return min(target_s, request.deadline_s) - LEVEL_S * levels, request.arrival


class WaitingRequests:
    """Sorted lists, one for each kind. `QueueLimits` bounds them, so insertion by bisection is cheap."""

    def __init__(self, kind_of: Callable[[LiveRequest], Kind]) -> None:
        self._kind_of = kind_of
        self._lines: dict[Kind, list[tuple[Turn, LiveRequest]]] = {}
        self._places: dict[RequestId, tuple[Kind | None, Turn, LiveRequest]] = {}
        """Each request that waits, with its kind and its turn. A request without a kind is parked or behind a leader."""
        self._parked: dict[RequestId, LiveRequest] = {}
        self._behind: dict[RequestId, dict[RequestId, LiveRequest]] = {}
        """The siblings that wait for their leader, by its id."""
        self.fresh: dict[Kind, None] = {}
        """The kinds whose first request may have changed since `fresh` was cleared."""

    def add(self, request: LiveRequest) -> None:
        """Insert a request at its turn."""
        self._insert(request, self._kind_of(request), turn_of(request))

    def add_behind(self, request: LiveRequest) -> None:
        """Let a sibling wait for its leader. It has no place in the order until `free` gives it one."""
        self._behind.setdefault(request.leader, {})[request.request_id] = request
        self._places[request.request_id] = None, turn_of(request), request

    def free(self, leader: RequestId) -> list[LiveRequest]:
        """Insert the siblings that wait for a leader at their turns, and return them."""
        siblings = list(self._behind.get(leader, {}).values())
        for request in siblings:
            self._leave_leader(request)
            self.add(request)
        return siblings

    def _leave_leader(self, request: LiveRequest) -> None:
        siblings = self._behind[request.leader]
        del siblings[request.request_id]
        if not siblings:
            del self._behind[request.leader]

    def _insert(self, request: LiveRequest, kind: Kind, turn: Turn) -> None:
        line = self._lines.setdefault(kind, [])
        bisect.insort(line, (turn, request))
        self._places[request.request_id] = kind, turn, request
        self.fresh[kind] = None

    def holds(self, request: LiveRequest) -> bool:
        """Tell whether a request waits."""
        place = self._places.get(request.request_id)
        return place is not None and place[2] is request

    def remove(self, request: LiveRequest) -> None:
        """Remove a request that waits."""
        kind, turn, found = self._places[request.request_id]
        assert found is request
        if request.request_id in self._behind.get(request.leader, {}):
            self._leave_leader(request)
        elif kind is None:
            del self._parked[request.request_id]
        else:
            self._take(kind, turn)
        del self._places[request.request_id]

    def _take(self, kind: Kind, turn: Turn) -> None:
        line = self._lines[kind]
        del line[bisect.bisect_left(line, (turn,))]
        self.fresh[kind] = None
        if not line:
            del self._lines[kind]

    def kinds(self) -> list[Kind]:
        """Return the kinds of which a request waits that is not parked."""
        return list(self._lines)

    def first(self, kind: Kind) -> tuple[Turn, LiveRequest] | None:
        """Return the first request of a kind with its turn. None: no request of the kind waits."""
        line = self._lines.get(kind)
        return line[0] if line else None

    def park(self, request: LiveRequest) -> None:
        """Put a request aside that no linked worker could serve."""
        kind, turn, _ = self._places[request.request_id]
        if kind is not None:
            self._parked[request.request_id] = request
            self._places[request.request_id] = None, turn, request
            self._take(kind, turn)

    def parked(self) -> list[LiveRequest]:
        """Return the parked requests. They are in no order: each look parks them anew, by their turns."""
        return list(self._parked.values())

    def unpark(self, request: LiveRequest) -> None:
        """Put a parked request back in its line."""
        _, turn, _ = self._places[request.request_id]
        self._insert(request, self._kind_of(request), turn)
        del self._parked[request.request_id]

    def sort_anew(self) -> None:
        """Find the kinds of all requests again, because the lengths of workers have changed."""
        waiting = [(turn, request) for line in self._lines.values() for turn, request in line]
        self._lines.clear()
        for turn, request in waiting:
            self._insert(request, self._kind_of(request), turn)

    def ahead_of(self, request: LiveRequest) -> int:
        """Count the requests whose turn is before that of a request, which need not wait here."""
        turn = turn_of(request)
        return sum(bisect.bisect_left(line, (turn,)) for line in self._lines.values())

    def leaders(self) -> list[RequestId]:
        """Return the requests for which siblings wait."""
        return list(self._behind)

    def all(self) -> list[LiveRequest]:
        """Return all requests in order of turns. This is a copy: the caller may remove requests while it walks over it."""
        return [request for _, request in sorted((turn, request) for _, turn, request in self._places.values())]

    def unsorted(self) -> list[LiveRequest]:
        """Return all requests in no order."""
        return [request for _, _, request in self._places.values()]

    def __len__(self) -> int:
        return len(self._places)

    def check_invariants(self) -> None:
        """Assert that each request is in one line at its turn, or parked, or behind its leader."""
        for kind, line in self._lines.items():
            assert line
            assert [turn for turn, _ in line] == sorted({turn for turn, _ in line})
            for turn, request in line:
                assert self._places[request.request_id] == (kind, turn, request)
                assert turn == turn_of(request)
        for leader, siblings in self._behind.items():
            assert siblings
            assert all(request.leader == leader for request in siblings.values())
        behind = {request_id for siblings in self._behind.values() for request_id in siblings}
        aside = {request_id for request_id, (kind, _, _) in self._places.items() if kind is None}
        assert aside == self._parked.keys() | behind
        assert not self._parked.keys() & behind
        assert len(self._places) == len(aside) + sum(len(line) for line in self._lines.values())
