"""The waiting requests of one line that the same workers could serve, in a tree like that of their flows. Pure.

The first request is found from the top: the flow that is first among those beside it, down to a call, and then the request of
this call whose own turn is first. Places of flows rise while others of their requests are served elsewhere, so a heap may hold
an old place; it is brought up to date when it comes to the top.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence

from router.core.live_request import LiveRequest
from router.core.queue.flows import Flow

OwnTurn = tuple[float, int]
Item = tuple[OwnTurn, LiveRequest]


class Call:
    """The requests of one call, by their own turns."""

    def __init__(self) -> None:
        self.items: list[Item] = []


class Branch:
    """The flows below one flow that have requests here."""

    def __init__(self, depth: int) -> None:
        """`depth`: the levels of flows below. Those of the last level are calls."""
        self._depth = depth
        self._below: dict[str, tuple[Flow, Branch | Call]] = {}
        self._order: list[tuple[tuple[float, int, int], str]] = []

    def __bool__(self) -> bool:
        return bool(self._below)

    def add(self, flows: Sequence[Flow], item: Item) -> None:
        """Insert a request under its flows, of which the first one is below this branch."""
        flow = flows[0]
        found = self._below.get(flow.name)
        if found is None:
            found = self._below[flow.name] = flow, Call() if self._depth == 1 else Branch(self._depth - 1)
            heapq.heappush(self._order, (flow.place, flow.name))
        below = found[1]
        if isinstance(below, Call):
            bisect.insort(below.items, item)
        else:
            below.add(flows[1:], item)

    def remove(self, names: Sequence[str], turn: OwnTurn) -> None:
        """Remove the request with this own turn. Nothing happens if it is not here, so a broken removal may be repeated."""
        if names[0] not in self._below:
            return
        _, below = self._below[names[0]]
        if isinstance(below, Call):
            place = bisect.bisect_left(below.items, (turn,))
            if place < len(below.items) and below.items[place][0] == turn:
                del below.items[place]
            empty = not below.items
        else:
            below.remove(names[1:], turn)
            empty = not below
        if empty:
            del self._below[names[0]]
            if len(self._order) > 2 * len(self._below) + 8:  # entries of flows that have left
                self._order = sorted((flow.place, name) for name, (flow, _) in self._below.items())

    def first(self) -> tuple[list[Flow], Item]:
        """Return the first request with its flows. The branch is not empty."""
        flow, below = self._first_below()
        if isinstance(below, Call):
            return [flow], below.items[0]
        flows, item = below.first()
        return [flow, *flows], item

    def _first_below(self) -> tuple[Flow, Branch | Call]:
        while True:
            place, name = self._order[0]
            found = self._below.get(name)
            if found is None:
                heapq.heappop(self._order)
            elif found[0].place != place:
                heapq.heapreplace(self._order, (found[0].place, name))
            else:
                return found

    def before(self, names: Sequence[str], turn: OwnTurn) -> int:
        """Count the requests of one call whose own turn is before `turn`."""
        found = self._below.get(names[0])
        if found is None:
            return 0
        below = found[1]
        return bisect.bisect_left(below.items, (turn,)) if isinstance(below, Call) else below.before(names[1:], turn)

    def requests(self) -> Iterator[Item]:
        """Yield all requests, in no order of turns."""
        for _, below in self._below.values():
            yield from below.items if isinstance(below, Call) else below.requests()
