"""Start-time fair queueing between clients, their connections and their calls. Pure.

A *flow* is what one client, one of its connections or one call asks for. Each flow has a *start tag*: the tokens that it has
been served, on a scale that is comparable between flows that wait at the same time. The flow with the smallest tag is served
next, and its tag then rises by the tokens of the request. So two waiting flows are served equally many tokens, with a
difference of at most the largest request of any flow, whatever the numbers and sizes of their requests are. Flows form a tree:
clients share a line, the connections of a client share what it gets, and so do the calls of a connection.

A flow that begins to wait starts at the *virtual time* of its parent, so it neither saves service up nor pays for an idle time.
The virtual time rises with all service, by the share of one flow. If it were only the smallest tag, clients with one request
each would keep it from rising, and a flow with more requests would never be served again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pdserve.core.ids import RequestId

# Turns -----------------------------------------------------------------------------------------------------------
#
# The turn of a waiting request: the key by which requests are compared. Pure.
#
# A turn is a snapshot. It is taken when a request is looked at, because the start tags in it rise while others are served.


class Line(NamedTuple):
    """The requests that are served by fair queueing among each other. Lines are ordered by time."""

    slo_class: str
    priority: int
    replay: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of one waiting request before or behind others. Requests of one line are ordered by `tags`, requests of
    different lines by `time_s`."""

    time_s: float
    """The time when the first token should leave, counted from the time of the client's fair turn, less the seconds that its
    priority is worth."""
    own_s: float
    """The same time, counted from the request's arrival. It orders the requests of one call."""
    arrival: int
    """The number of its arrival, which orders equal times."""
    line: Line | None = None
    tags: tuple[float, ...] = ()
    """The start tag of its flow at each level, and when that flow was last served."""

    def __lt__(self, other: Turn) -> bool:
        if self.line is not None and self.line == other.line:
            return (self.tags, self.own_s, self.arrival) < (other.tags, other.own_s, other.arrival)
        return (self.time_s, self.arrival) < (other.time_s, other.arrival)

    def __le__(self, other: Turn) -> bool:
        return not other < self


FIRST: Final = Turn(-math.inf, -math.inf, 0)
"""The turn that comes before all others."""


# Flows -----------------------------------------------------------------------------------------------------------


KEPT_IDLE: Final = 1024
"""The approximate number of flows of a tree that are remembered while they do not wait. They take 1 MiB. Flows without debt are
forgotten first, which changes nothing. Then the least recently served flows are forgotten, and each loses the debt of one
request."""
Path = tuple[str, ...]
"""The names of a request's client, connection and call. All paths of one tree have equally many names."""


@dataclass(slots=True, eq=False)
class Flow:
    """One flow, with the flows below it."""

    name: str = ""
    tag: float = 0.0
    served: int = 0
    """The number of its last service. Among equal tags, the least recently served flow is first."""
    joined: int = 0
    """The number of the request with which it began to wait. It orders flows that were never served."""
    ready_s: float = 0.0
    """The time at which it was last served: its next request counts its wait from then on."""
    waiting: set[RequestId] = field(default_factory=set)
    """The requests that wait in it."""
    virtual: float = 0.0
    """The virtual time of the flows below."""
    top: float = 0.0
    """The largest tag that a flow below had."""
    backlogged: set[str] = field(default_factory=set)
    """The names of the flows below in which requests wait."""
    below: dict[str, Flow] = field(default_factory=dict)

    @property
    def place(self) -> tuple[float, int, int]:
        """The order of the flow among its sibling flows, smallest first. It only rises while the flow waits."""
        return self.tag, self.served, self.joined


class Flows:
    """The tree of flows of one line. `join` and `leave` note what waits, and `serve` charges what is served."""

    def __init__(self) -> None:
        self.root = Flow()
        self._services = self._joins = 0
        self._known = 0
        """The number of flows below the root."""

    def along(self, path: Path) -> list[Flow]:
        """Return the flows of a path from the client down. Flows that are not known yet are made."""
        found, flow = [], self.root
        for name in path:
            child = flow.below.get(name)
            if child is None:
                child = flow.below[name] = Flow(name, flow.virtual)
                self._known += 1
            found.append(child)
            flow = child
        return found

    def join(self, path: Path, request_id: RequestId) -> list[Flow]:
        """Note a request that begins to wait, and return its flows."""
        flows = self.along(path)
        parent = self.root
        self._joins += 1
        for flow in flows:
            if not flow.waiting:
                flow.joined = self._joins
                flow.tag = max(flow.tag, parent.virtual)
                parent.top = max(parent.top, flow.tag)
                parent.backlogged.add(flow.name)
            parent.waiting.add(request_id)
            parent = flow
        parent.waiting.add(request_id)
        return flows

    def leave(self, path: Path, request_id: RequestId) -> None:
        """Forget a request that waits no longer, whether it is served or not. A broken call may be repeated."""
        parent = self.root
        parent.waiting.discard(request_id)
        for flow in self.along(path):
            flow.waiting.discard(request_id)
            if not flow.waiting:
                parent.backlogged.discard(flow.name)
            parent = flow
        self._forget_idle(len(path))

    def serve(self, path: Path, tokens: float, now_s: float) -> None:
        """Charge a path for the tokens of a request. The request need not have waited."""
        self._services += 1
        parent = self.root
        for flow in self.along(path):
            flow.tag = (flow.tag if flow.waiting else max(flow.tag, parent.virtual)) + tokens
            flow.served, flow.ready_s = self._services, now_s
            parent.top = max(parent.top, flow.tag)
            sharing = len(parent.backlogged) + (not flow.waiting)
            parent.virtual = parent.top if sharing == 1 else min(parent.top, parent.virtual + tokens / sharing)
            parent = flow
        self._forget_idle(len(path))

    def charge(self, path: Path, tokens: float) -> None:
        """Charge a path for more tokens than `serve` charged. Flows that were forgotten are not charged."""
        parent = self.root
        for name in path:
            flow = parent.below.get(name)
            if flow is None:
                return
            flow.tag += tokens
            parent.top = max(parent.top, flow.tag)
            parent = flow

    def check_invariants(self) -> None:
        """Assert that each request that waits in a flow waits in one of the flows below it."""
        _check(self.root)
        assert self._known == sum(1 for _ in _below(self.root))

    def _forget_idle(self, levels: int) -> None:
        """Forget flows that do not wait, once there are twice as many flows as are kept. Each waiting request has at most
        `levels` flows."""
        if self._known <= 2 * KEPT_IDLE + levels * len(self.root.waiting):
            return
        idle = [
            (flow.tag > parent.virtual, flow.served, parent, flow) for parent, flow in _below(self.root) if not flow.waiting
        ]
        idle.sort(key=lambda one: one[:2])
        for _, _, parent, flow in idle[:-KEPT_IDLE]:
            del parent.below[flow.name]
        self._known = sum(1 for _ in _below(self.root))


def _below(parent: Flow) -> Iterator[tuple[Flow, Flow]]:
    """Yield all flows below one, each with its own parent."""
    for flow in parent.below.values():
        yield parent, flow
        yield from _below(flow)


def _check(parent: Flow) -> None:
    for name, flow in parent.below.items():
        assert flow.name == name
        assert not flow.waiting or flow.tag <= parent.top
        _check(flow)
    assert parent.virtual <= parent.top or not parent.below
    if parent.below:
        assert sorted(parent.waiting) == sorted(request_id for flow in parent.below.values() for request_id in flow.waiting)
        assert parent.backlogged == {flow.name for flow in parent.below.values() if flow.waiting}
