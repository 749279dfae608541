"""The schedule of a run: which request is sent when. Pure: time comes in, and what to do goes out.

A request is *blocked* until the requests that it follows have ended, then *planned* for a moment, then it *runs*, then it has
*ended*. Times are seconds since the start of the run.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, fields
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve_bench.load.target import PREDECESSOR_FAILED, PREDECESSOR_UNKNOWN
from pdserve_bench.workload.request import BenchRequest

LOOKAHEAD: Final = 64
"""Requests without predecessors that are ready before their time, so that making a long prompt delays nothing."""
MAX_BLOCKED: Final = 1 << 14
"""The most blocked requests. No further request is taken from the workload while there are so many."""
AT_ONCE_S: Final = 1e-9
"""Clocks round: a request that is due so soon is due now."""


@dataclass(frozen=True, slots=True)
class RequestStart:
    """Send the request now."""

    request: BenchRequest
    planned_s: float
    warm_up: bool
    held: bool
    """The request was due before `max_concurrency` let it have a place."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Give up the request, which was not sent."""

    request: BenchRequest
    at_s: float
    warm_up: bool
    reason: str


@dataclass(slots=True)
class _Blocked:
    request: BenchRequest
    missing: int  # predecessors that have not ended
    index: int


class Schedule:
    """The schedule of one run."""

    def __init__(self, limits: RunLimits) -> None:
        self._limits = limits
        self._open = True  # more requests may be sent
        self._more = True  # the workload may have more requests
        self._taken = 0  # requests that came from the workload
        self._measured = 0  # the measured requests that were started or given up
        self._end_s = math.inf
        if limits.duration_s is not None and not limits.warmup_requests:
            self._end_s = limits.warmup_s + limits.duration_s
        self._last = -1  # the highest number so far
        self._roots = 0  # planned and ready requests without predecessors
        self._planned: list[tuple[float, int, BenchRequest]] = []  # a heap of (due, index, request)
        self._ready: deque[tuple[float, int, BenchRequest]] = deque()  # those without a time: they take what is left of places
        self._blocked: dict[int, _Blocked] = {}
        self._followers: dict[int, list[int]] = {}  # the blocked requests that wait for a number
        self._ended: dict[int, tuple[float, bool]] = {}  # number: (its end, it was answered whole)
        self._pending: set[int] = set()  # numbers that are planned or run
        self._running: set[int] = set()
        self._free_s: deque[float] = deque()  # the times at which used places became free, the oldest first
        self._unused = limits.max_concurrency or MAX_CONCURRENCY  # places that were never taken

    @property
    def wants(self) -> bool:
        """The schedule has room for one more request of the workload."""
        limits = self._limits
        exact = limits.num_requests is not None and limits.warmup_s == 0
        if exact and self._taken >= limits.warmup_requests + (limits.num_requests or 0):
            return False
        return self._open and self._more and self._roots < LOOKAHEAD and len(self._blocked) < MAX_BLOCKED

    @property
    def over(self) -> bool:
        """Nothing runs, and nothing will be sent any more."""
        return not (self._running or self._planned or self._ready or self._blocked or self.wants)

    @property
    def running(self) -> frozenset[int]:
        """The numbers of the requests that run."""
        return frozenset(self._running)

    def no_more(self) -> None:
        """The workload has ended."""
        self._more = False

    def close(self) -> None:
        """Send nothing more. What runs may end."""
        self._open = False
        self._planned.clear()
        self._ready.clear()
        self._blocked.clear()
        self._followers.clear()
        self._roots = 0
        self._pending = set(self._running)

    def add(self, request: BenchRequest, now_s: float) -> list[Fail]:
        """Take the next request of the workload. Raises `ValueError` when its number is not above those before it."""
        if request.number <= self._last:
            raise ValueError(f"request {request.number} comes after request {self._last}: numbers must rise")
        self._last = request.number
        index = self._taken
        self._taken += 1
        if any(not (number in self._ended or number in self._blocked or number in self._pending) for number in request.after):
            return self._fail(request, index, now_s, PREDECESSOR_UNKNOWN)
        ended = [self._ended[number] for number in request.after if number in self._ended]
        if any(not ok for _, ok in ended):
            return self._fail(request, index, now_s, PREDECESSOR_FAILED)
        missing = sorted({number for number in request.after if number not in self._ended})
        if missing:
            self._blocked[request.number] = _Blocked(request, len(missing), index)
            for number in missing:
                self._followers.setdefault(number, []).append(request.number)
        else:
            self._plan(request, index, now_s)
        return []

    def begin(self, now_s: float) -> list[RequestStart]:
        """Start all requests that are due and have a place. Close the schedule when the time is over."""
        starts: list[RequestStart] = []
        while (self._unused or self._free_s) and (due := self._next_due(now_s)) is not None:
            due_s, index, request = due
            place_s = -math.inf if self._unused else self._free_s.popleft()
            planned_s = max(due_s, place_s)
            if planned_s >= self._end_s:
                self.close()
                break
            self._unused -= bool(self._unused)
            self._roots -= not request.after
            self._running.add(request.number)
            held = place_s > due_s and request.send_at_s is not None
            starts.append(RequestStart(request, planned_s, self._count(index, planned_s), held))
            if self._full:
                self.close()
        if now_s + AT_ONCE_S >= self._end_s:
            self.close()
        return starts

    def ended(self, number: int, at_s: float, *, ok: bool) -> list[Fail]:
        """Note that a running request has ended. Return its followers that can no longer be sent."""
        self._running.remove(number)
        self._free_s.append(at_s)
        return self._release(number, at_s, ok)

    def next_s(self) -> float | None:
        """Return the next time at which `begin` should be called. None: only the end of a request changes anything."""
        due_s = self._planned[0][0] if self._planned and (self._unused or self._free_s) else math.inf
        at_s = min(due_s, self._end_s if self._open else math.inf)
        return None if at_s == math.inf else at_s

    def _next_due(self, now_s: float) -> tuple[float, int, BenchRequest] | None:
        if self._planned and self._planned[0][0] <= now_s + AT_ONCE_S:
            return heapq.heappop(self._planned)
        return self._ready.popleft() if self._ready else None

    @property
    def _full(self) -> bool:
        return self._limits.num_requests is not None and self._measured >= self._limits.num_requests

    def _plan(self, request: BenchRequest, index: int, now_s: float) -> None:
        self._roots += not request.after
        self._pending.add(request.number)
        if not request.send_at_s and not request.after:  # None, or 0: all at once, as fast as the generator can
            self._ready.append((now_s, index, request))
            return
        ends_s = [self._ended[number][0] + request.think_s for number in request.after]
        heapq.heappush(self._planned, (max([request.send_at_s or 0.0, *ends_s]), index, request))

    def _count(self, index: int, at_s: float) -> bool:
        """Tell whether a request only warms up. Count it, and set the end of the run with the first measured one."""
        if index < self._limits.warmup_requests or at_s < self._limits.warmup_s:
            return True
        if not self._measured and self._limits.duration_s is not None and self._limits.warmup_requests:
            self._end_s = max(at_s, self._limits.warmup_s) + self._limits.duration_s
        self._measured += 1
        return False

    def _fail(self, request: BenchRequest, index: int, at_s: float, reason: str) -> list[Fail]:
        """Give a request up, and all that follow it."""
        fail = Fail(request, at_s, self._count(index, at_s), reason)
        return [fail, *self._release(request.number, at_s, ok=False)]

    def _release(self, number: int, at_s: float, ok: bool) -> list[Fail]:
        """Note an end, and plan or give up what waited for it. A long chain is walked, not recursed."""
        fails: list[Fail] = []
        ends = deque([(number, ok)])
        while ends:
            number, ok = ends.popleft()
            self._ended[number] = (at_s, ok)
            self._pending.discard(number)
            for follower in self._followers.pop(number, ()):
                blocked = self._blocked.get(follower)
                if blocked is None:  # another predecessor has failed
                    continue
                blocked.missing -= 1
                if not ok:
                    del self._blocked[follower]
                    if self._full:
                        continue
                    warm_up = self._count(blocked.index, at_s)
                    fails.append(Fail(blocked.request, at_s, warm_up, PREDECESSOR_FAILED))
                    ends.append((follower, False))
                elif not blocked.missing:
                    del self._blocked[follower]
                    self._plan(blocked.request, blocked.index, at_s)
        if self._full:
            self.close()
        return fails


# The limits of one run of the load generator. Pure.


MAX_CONCURRENCY = 1 << 16
"""The most requests at the same time. A process has not more sockets towards one port."""


@dataclass(frozen=True, slots=True)
class RunLimits:
    """The limits of one run. A run ends when the first of them is reached, and all requests that were sent have ended.

    Raises `ConfigError`, which names the field and its limit, when a value is out of range.
    """

    duration_s: float | None = None
    """The time in which measured requests are sent. None: until `num_requests` were sent or the workload ends."""
    num_requests: int | None = None
    """The most measured requests. None: as many as the workload has, or as `duration_s` allows."""
    max_concurrency: int | None = None
    """The most requests at the same time. None: open loop, every request is sent at its time. With a limit, a request that
    waits for a place is planned for the moment at which it gets one, so this wait is not lag."""
    warmup_requests: int = 0
    """The first requests of the workload, which are sent but not measured."""
    warmup_s: float = 0.0
    """Requests that are planned before this time are sent but not measured."""
    request_timeout_s: float = 600.0
    """The longest time of one request, its connection included."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{one.name}: {value} is not a finite number")
        for name, low in (("duration_s", 0.0), ("request_timeout_s", 0.0)):
            value = getattr(self, name)
            if value is not None and value <= low:
                raise ConfigError(f"{name}: {value:g} is not above 0")
        for name, low in (("num_requests", 1), ("max_concurrency", 1), ("warmup_requests", 0), ("warmup_s", 0.0)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name}: {value:g} is below {low:g}")
        if self.max_concurrency is not None and self.max_concurrency > MAX_CONCURRENCY:
            raise ConfigError(f"max_concurrency: {self.max_concurrency} is above {MAX_CONCURRENCY}")
