"""Requests that wait for room on a decode worker, in the order of their turns.

Requests of one class and priority form a *line*, in which clients take turns by fair queueing: see `queue/flows.py`. A call of
many requests, or a client of many calls, thus delays the others by one request at a time. Lines are ordered by time: the time
at which the first token should leave, less `LEVEL_S` for each level of priority. This time counts from the client's fair turn,
which is the time of its last service if the client has waited since then. A burst therefore does not age as a whole. The first
request of a line ages until it is served, so no request waits for ever. A priority below the priority of the class orders only
the requests of one call. A replay counts as one level more, and replays stand in a line of their own, in the order of their
arrivals: they were charged when they were new.

Requests of one *kind* could be served by the same workers and need about as much room. When the first request of a kind finds
no room, no other request of this kind is tried: a worker with new room is compared with one request of each kind, however many
wait. Requests that no linked worker could serve are *parked*: they keep their turns, and no request waits behind them. Siblings
wait *behind* their leader until its KV is there or it has ended: no request waits for a sibling.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from pdserve.core.ids import RequestId, WorkerId
from pdserve.core.sampling import Placement
from router.core.live_request import LiveRequest
from router.core.turns import Flow, Flows, Line, Path, Turn

# Lanes -----------------------------------------------------------------------------------------------------------
#
# The waiting requests of one line that the same workers could serve, in a tree like that of their flows. Pure.
#
# The first request is found from the top: at each level the first flow, down to a call, and then the request of this call with
# the first own turn. Places of flows rise while other requests of these flows are served elsewhere, so a heap may hold an old
# place; the place is brought up to date when it comes to the top.


OwnTurn = tuple[float, int]
Item = tuple[OwnTurn, LiveRequest]


class LaneCall:
    """The requests of one call, by their own turns."""

    def __init__(self) -> None:
        self.items: list[Item] = []


class Branch:
    """The flows below one flow that have requests here."""

    def __init__(self, depth: int) -> None:
        """`depth`: the levels of flows below. The flows of the last level are calls."""
        self._depth = depth
        self._below: dict[str, tuple[Flow, Branch | LaneCall]] = {}
        self._order: list[tuple[tuple[float, int, int], str]] = []

    def __bool__(self) -> bool:
        return bool(self._below)

    def add(self, flows: Sequence[Flow], item: Item) -> None:
        """Insert a request under its flows. The first of these flows is directly below this branch."""
        flow = flows[0]
        found = self._below.get(flow.name)
        if found is None:
            found = self._below[flow.name] = flow, LaneCall() if self._depth == 1 else Branch(self._depth - 1)
            heapq.heappush(self._order, (flow.place, flow.name))
        below = found[1]
        if isinstance(below, LaneCall):
            bisect.insort(below.items, item)
        else:
            below.add(flows[1:], item)

    def remove(self, names: Sequence[str], turn: OwnTurn) -> None:
        """Remove the request with this own turn. Nothing happens if it is not here, so a broken removal may be repeated."""
        if names[0] not in self._below:
            return
        _, below = self._below[names[0]]
        if isinstance(below, LaneCall):
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
        if isinstance(below, LaneCall):
            return [flow], below.items[0]
        flows, item = below.first()
        return [flow, *flows], item

    def _first_below(self) -> tuple[Flow, Branch | LaneCall]:
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
        return bisect.bisect_left(below.items, (turn,)) if isinstance(below, LaneCall) else below.before(names[1:], turn)

    def requests(self) -> Iterator[Item]:
        """Yield all requests, in no order of turns."""
        for _, below in self._below.values():
            yield from below.items if isinstance(below, LaneCall) else below.requests()


# Waiting requests ------------------------------------------------------------------------------------------------


LEVEL_S: Final = 3.0
"""The seconds that one level of priority is worth. All two hundred levels outweigh the default deadline, 600 s."""
DEFAULT_TTFT_S: Final = 2.0
"""The least target that counts for the turn of a request whose class is not urgent or has no target: the target of the built-in
class "batch"."""
LEVELS: Final = 3
"""The levels of flows: clients, connections, calls."""
NOBODY: Final[Path] = ("",) * LEVELS
"""The path of a request whose client is not known. Such requests are served in the order of their own turns."""


class Kind(NamedTuple):
    """The traits that requests share when the same workers could serve them."""

    decode_length: int  # max_model_len of the shortest decode workers that are long enough; 0: none are
    prefill_length: int  # the same for prefill workers
    asked: Placement
    short: bool  # the prompt is computed on the decode worker, where the settings decide
    size: int  # bucket of the KV that they need, in quarters of a power of two
    avoid: tuple[WorkerId, ...] = ()  # workers with which they have failed


class First(NamedTuple):
    """The first request of a kind in a line."""

    turn: Turn
    kind: Kind
    request: LiveRequest


def size_of(tokens: int) -> int:
    """Return the size bucket of a number of KV tokens. The largest number of a bucket is at most a fifth larger than the
    smallest."""
    return int(4 * math.log2(max(1, tokens)))


def own_turn(request: LiveRequest) -> OwnTurn:
    """Return what orders a request within its call, as if its client were alone. It does not change while the request waits."""
    return _time_s(request, request.times.arrived_s, request.spec.priority), request.arrival


def _time_s(request: LiveRequest, since_s: float, priority: int) -> float:
    target_s = request.slo.ttft_s or DEFAULT_TTFT_S
    if not request.slo.urgent:
        target_s = max(target_s, DEFAULT_TTFT_S)
    return since_s + target_s - LEVEL_S * (priority + request.replay)


def line_of(request: LiveRequest) -> Line:
    """Return the line of a request. A client that lowers its priority does not leave its line: otherwise it would count in two
    lines."""
    return Line(request.slo.name, max(request.slo.priority, request.spec.priority), request.replay)


def path_of(request: LiveRequest, line: Line) -> Path:
    """Return the flows of a request in its line. It has `LEVELS` names."""
    return NOBODY if line.replay else (*request.client, *NOBODY[len(request.client) :])[:LEVELS]


def newcomer(request: LiveRequest) -> Turn:
    """Return the turn of a request behind all that wait in its line."""
    time_s, arrival = own_turn(request)
    return Turn(time_s, time_s, arrival, line_of(request), (math.inf,))


def placed_again(request: LiveRequest) -> Turn:
    """Return the turn of a running request that is to be placed elsewhere. It has no line: its client was charged before."""
    time_s, arrival = own_turn(request)
    return Turn(time_s, time_s, arrival)


class WaitingRequests:
    """Requests by kind and line. `QueueLimits` bounds them."""

    def __init__(self, kind_of: Callable[[LiveRequest], Kind]) -> None:
        self._kind_of = kind_of
        self._lanes: dict[Kind, dict[Line, Branch]] = {}
        self._flows: dict[Line, Flows] = {}
        """The flows of each line, also of lines in which nobody waits: a few, since the settings name the classes."""
        self._places: dict[RequestId, tuple[Kind | None, LiveRequest]] = {}
        """Each request that waits, with its kind. A request without a kind is parked, alone or behind a leader."""
        self._parked: dict[RequestId, LiveRequest] = {}
        self._behind: dict[RequestId, dict[RequestId, LiveRequest]] = {}
        """The siblings that wait for their leader, by its id."""
        self._alone: dict[RequestId, LiveRequest] = {}
        """The requests that wait until they may run alone."""
        self.fresh: dict[Kind, None] = {}
        """The kinds whose first request may have changed since `fresh` was last cleared."""

    def add(self, request: LiveRequest) -> None:
        """Insert a request at its turn."""
        self._insert(request, self._kind_of(request))

    def add_behind(self, request: LiveRequest) -> None:
        """Let a sibling wait for its leader. It has no place in the order until `free` gives it one."""
        self._behind.setdefault(request.leader, {})[request.request_id] = request
        self._places[request.request_id] = None, request

    def add_alone(self, request: LiveRequest) -> None:
        """Let a suspect wait until it may run alone. No request waits for it, and it waits for no room beside others."""
        self._alone[request.request_id] = request
        self._places[request.request_id] = None, request

    def is_alone(self, request: LiveRequest) -> bool:
        """Tell whether a request waits until it may run alone."""
        return request.request_id in self._alone

    def alone(self) -> list[LiveRequest]:
        """Return the requests that wait until they may run alone, in no order."""
        return list(self._alone.values())

    def free(self, leader: RequestId) -> list[LiveRequest]:
        """Insert the siblings that wait for a leader at their turns, and return them."""
        siblings = list(self._behind.get(leader, {}).values())
        for request in siblings:
            kind = self._kind_of(request)  # before anything changes: this may fail
            self._leave_leader(request)
            self._insert(request, kind)
        return siblings

    def _leave_leader(self, request: LiveRequest) -> None:
        siblings = self._behind[request.leader]
        del siblings[request.request_id]
        if not siblings:
            del self._behind[request.leader]

    def _insert(self, request: LiveRequest, kind: Kind) -> None:
        line = line_of(request)
        self._places[request.request_id] = kind, request  # comes first, so that a broken insertion can be removed
        flows = self._flows.setdefault(line, Flows()).join(path_of(request, line), request.request_id)
        self._sort_in(request, kind, line, flows)

    def _sort_in(self, request: LiveRequest, kind: Kind, line: Line, flows: list[Flow]) -> None:
        lane = self._lanes.setdefault(kind, {}).setdefault(line, Branch(LEVELS))
        lane.add(flows, (own_turn(request), request))
        self._places[request.request_id] = kind, request
        self.fresh[kind] = None

    def holds(self, request: LiveRequest) -> bool:
        """Tell whether a request waits."""
        place = self._places.get(request.request_id)
        return place is not None and place[1] is request

    def kind(self, request: LiveRequest) -> Kind | None:
        """Return the kind of a request that waits. None: it does not wait, is parked, or waits behind a leader."""
        return self._places[request.request_id][0] if self.holds(request) else None

    def remove(self, request: LiveRequest) -> None:
        """Remove a request that waits."""
        kind, found = self._places[request.request_id]
        assert found is request
        if request.request_id in self._behind.get(request.leader, {}):
            self._leave_leader(request)
        elif request.request_id in self._alone:
            del self._alone[request.request_id]
        elif kind is None:
            self._parked.pop(request.request_id, None)
        else:
            self._take(kind, request)
        del self._places[request.request_id]

    def _take(self, kind: Kind, request: LiveRequest) -> None:
        """Take a request out of its lane. A broken call may be repeated."""
        line = line_of(request)
        path = path_of(request, line)
        self.fresh[kind] = None
        if line in self._flows:
            self._flows[line].leave(path, request.request_id)
        lanes = self._lanes.get(kind, {})
        if line in lanes:
            lanes[line].remove(path, own_turn(request))
            if not lanes[line]:
                del lanes[line]
                if not lanes:
                    del self._lanes[kind]

    def serve(self, request: LiveRequest, tokens: int, now_s: float) -> None:
        """Charge the flows of a request that gets a worker for its tokens. The request need not have waited. It is charged
        once, however often it is placed."""
        if request.charged_tokens is None:
            line = line_of(request)
            path = path_of(request, line)
            request.charged_tokens, request.charged_to = max(1, tokens), (line, path)
            self._flows.setdefault(line, Flows()).serve(path, request.charged_tokens, now_s)

    def settle(self, request: LiveRequest, tokens: int) -> None:
        """Charge the flows of a request that ends for the tokens beyond its first charge. The request must not be waiting.
        Without this charge, a client whose outputs become longer would pay only for the outputs that were expected."""
        charged = request.charged_tokens
        if charged is not None and request.charged_to is not None and tokens > charged:
            line, path = request.charged_to
            self._flows[line].charge(path, tokens - charged)

    def kinds(self) -> list[Kind]:
        """Return the kinds of which a request waits that is not parked."""
        return list(self._lanes)

    def walk(self, kinds: Iterable[Kind]) -> Walk:
        """Begin a walk over the first requests of these kinds."""
        return Walk(self, kinds)

    def firsts(self, kind: Kind) -> list[First]:
        """Return the first request of a kind in each line."""
        return [first for line in self._lanes.get(kind, {}) if (first := self.first(kind, line)) is not None]

    def first(self, kind: Kind, line: Line) -> First | None:
        """Return the first request of a kind in a line. None: there is none."""
        lane = self._lanes.get(kind, {}).get(line)
        if lane is None:
            return None
        flows, (own, request) = lane.first()
        return First(_turn(request, own, line, flows), kind, request)

    def turn_of(self, request: LiveRequest) -> Turn:
        """Return the present turn of a request that waits, unless it is parked or behind a leader."""
        line = line_of(request)
        return _turn(request, own_turn(request), line, self._flows[line].along(path_of(request, line)))

    def park(self, request: LiveRequest) -> None:
        """Put a request aside that no linked worker could serve."""
        kind, _ = self._places[request.request_id]
        if kind is not None:
            self._take(kind, request)
            self._parked[request.request_id] = request
            self._places[request.request_id] = None, request

    def parked(self) -> list[LiveRequest]:
        """Return the parked requests. They are in no order: each look parks them anew, by their turns."""
        return list(self._parked.values())

    def unpark(self, request: LiveRequest) -> None:
        """Put a parked request back in its line."""
        kind = self._kind_of(request)
        del self._parked[request.request_id]
        self._insert(request, kind)

    def sort_anew(self) -> None:
        """Find the kinds of all requests again, because the lengths of workers have changed."""
        waiting = [item for lanes in self._lanes.values() for lane in lanes.values() for item in lane.requests()]
        self._lanes.clear()
        for _, request in waiting:
            line = line_of(request)
            self._sort_in(request, self._kind_of(request), line, self._flows[line].along(path_of(request, line)))

    def ahead_of(self, request: LiveRequest) -> int:
        """Estimate how many requests will be served before `request`, which need not wait here: the earlier requests of its own
        call, and equally many requests of each sibling flow. Other lines count if they have a request with an earlier turn."""
        line, own = line_of(request), own_turn(request)
        mine = self._ahead_in(line, path_of(request, line), own)
        return mine + sum(self._ahead_in_other(other, mine, own) for other in self._flows if other != line)

    def _ahead_in(self, line: Line, path: Path, own: OwnTurn) -> int:
        ahead = sum(lanes[line].before(path, own) for lanes in self._lanes.values() if line in lanes)
        flow: Flow | None = self._flows[line].root if line in self._flows else None
        levels: list[Flow] = []
        for name in path:
            if flow is not None:
                levels.append(flow)
                flow = flow.below.get(name)
        for level, name in zip(reversed(levels), reversed(path[: len(levels)]), strict=True):
            ahead += sum(min(len(flow.waiting), ahead + 1) for flow in level.below.values() if flow.name != name)
        return ahead

    def _ahead_in_other(self, line: Line, mine: int, own: OwnTurn) -> int:
        lanes = [lanes[line] for lanes in self._lanes.values() if line in lanes]
        if not any(self._time_of(lane) < own[0] for lane in lanes):
            return 0
        unknown = sum(lane.before(NOBODY, own) for lane in lanes)
        return unknown + sum(min(len(flow.waiting), mine + 1) for flow in self._flows[line].root.below.values() if flow.name)

    def _time_of(self, lane: Branch) -> float:
        flows, (own, request) = lane.first()
        return _turn(request, own, line_of(request), flows).time_s

    def leaders(self) -> list[RequestId]:
        """Return the requests for which siblings wait."""
        return list(self._behind)

    def all(self) -> list[LiveRequest]:
        """Return all requests by their own turns. This is a copy: the caller may remove requests while it walks over it."""
        return sorted((request for _, request in self._places.values()), key=own_turn)

    def unsorted(self) -> list[LiveRequest]:
        """Return all requests in no order."""
        return [request for _, request in self._places.values()]

    def __len__(self) -> int:
        return len(self._places)

    def check_invariants(self) -> None:
        """Assert that each request is in one lane at its turn, or parked, or behind its leader, and that flows count them."""
        for kind, lanes in self._lanes.items():
            assert lanes
            for line, lane in lanes.items():
                for own, request in lane.requests():
                    assert self._places[request.request_id] == (kind, request)
                    assert (own, line) == (own_turn(request), line_of(request))
        items: list[Item] = [item for lanes in self._lanes.values() for lane in lanes.values() for item in lane.requests()]
        for line, flows in self._flows.items():
            flows.check_invariants()
            assert flows.root.waiting == {request.request_id for _, request in items if line_of(request) == line}
        for leader, siblings in self._behind.items():
            assert siblings
            assert all(request.leader == leader for request in siblings.values())
        behind = {request_id for siblings in self._behind.values() for request_id in siblings}
        aside = {request_id for request_id, (kind, _) in self._places.items() if kind is None}
        assert aside == self._parked.keys() | behind | self._alone.keys()
        assert not self._alone.keys() & (self._parked.keys() | behind)
        assert not self._parked.keys() & behind
        assert len(self._places) == len(aside) + len(items)


def _turn(request: LiveRequest, own: OwnTurn, line: Line, flows: list[Flow]) -> Turn:
    client = flows[0]
    since_s = max(request.times.arrived_s, client.ready_s) if client.name else request.times.arrived_s
    priority = line.priority if client.name else request.spec.priority
    tags = tuple([part for flow in flows for part in flow.place])
    return Turn(_time_s(request, since_s, priority), own[0], own[1], line, tags)


class Walk:
    """The order in which the first requests of some kinds are looked at: the first request of each line by fair queueing, and
    of these the request with the earliest time. The caller reports how each look ended: by `served`, or by `left`."""

    def __init__(self, waiting: WaitingRequests, kinds: Iterable[Kind]) -> None:
        self._waiting = waiting
        self._heads: dict[Line, list[tuple[Turn, Kind]]] = {}
        self._left: set[Kind] = set()
        for kind in kinds:
            for first in waiting.firsts(kind):
                self._push(first)

    def _push(self, first: First) -> None:
        assert first.turn.line is not None
        heapq.heappush(self._heads.setdefault(first.turn.line, []), (first.turn, first.kind))

    def next(self) -> First | None:
        """Return the next request to be looked at. None: the walk is over."""
        return min((first for line in list(self._heads) if (first := self._first_of(line)) is not None), default=None)

    def _first_of(self, line: Line) -> First | None:
        """Return the first request of a line whose kind is not left. Tags rise while other requests are served, so the heads
        are compared anew."""
        heads = self._heads[line]
        while heads:
            turn, kind = heads[0]
            first = None if kind in self._left else self._waiting.first(kind, line)
            if first is None:
                heapq.heappop(heads)
            elif first.turn == turn:
                return first
            else:
                heapq.heapreplace(heads, (first.turn, kind))
        del self._heads[line]
        return None

    def left(self, kind: Kind) -> None:
        """Look at no more requests of a kind."""
        self._left.add(kind)
