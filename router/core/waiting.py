"""Requests that wait for room on a decode worker, in the order of their turns.

A turn is the time of arrival, less `LEVEL_S` for each level of priority. A request of higher priority overtakes earlier ones,
but only those that came at most that time before it, so no request waits for ever. A replay counts as one level more.

New requests are bounded by count and tokens. Replays are not: each was counted when it was new, and to refuse one would lose
tokens that a client already has.
"""

from __future__ import annotations

import bisect
from collections import deque
from typing import Final

from pdserve.core.errors import Overloaded
from router.core.live_request import LiveRequest

DRAIN_SAMPLES: Final = 64
RETRY_AFTER_MIN_S: Final = 0.1
RETRY_AFTER_MAX_S: Final = 30.0
RETRY_AFTER_UNKNOWN_S: Final = 1.0

RATE_WINDOW_S: Final = 30.0
"""Requests that ended longer ago say nothing about how fast the queue drains now."""

LEVEL_S: Final = 3.0
"""The seconds that one level of priority is worth. All two hundred levels outweigh the default deadline of 600 s."""

_Key = tuple[float, int]


class WaitingRequests:
    """An ordered list. At most `max_requests` new ones may wait, so insertion by bisection is cheap."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._keys: list[_Key] = []
        self._requests: list[LiveRequest] = []
        self._new = 0
        self._new_tokens = 0
        self._finished_s: deque[float] = deque(maxlen=DRAIN_SAMPLES)
        self.added = 0
        """The number of times that a request began to wait."""

    def check_room(self, prompt_tokens: int, *, now_s: float) -> None:
        """Check that a new request of `prompt_tokens` may wait. Raises `Overloaded` if not. One may always wait when no other
        new one does."""
        full = self._new >= self._max_requests
        if full or (self._new and self._new_tokens + prompt_tokens > self._max_tokens):
            raise Overloaded(
                f"{self._new} requests with {self._new_tokens} prompt tokens are waiting; "
                f"at most {self._max_requests} requests and {self._max_tokens} tokens may wait",
                retry_after_s=self._retry_after_s(now_s),
            )

    def add(self, request: LiveRequest) -> None:
        """Insert a request at its turn."""
        key = _key(request)
        position = bisect.bisect_left(self._keys, key)
        self._count(request, 1)
        self._keys.insert(position, key)
        self._requests.insert(position, request)
        self.added += 1

    def holds(self, request: LiveRequest) -> bool:
        """Tell whether a request waits."""
        return self.at(bisect.bisect_left(self._keys, _key(request))) is request

    def remove(self, request: LiveRequest) -> None:
        """Remove a request that waits."""
        position = bisect.bisect_left(self._keys, _key(request))
        assert self._requests[position] is request
        self._count(request, -1)
        del self._keys[position], self._requests[position]

    def _count(self, request: LiveRequest, sign: int) -> None:
        if not request.replay:
            self._new += sign
            self._new_tokens += sign * len(request.spec.prompt_ids)

    def at(self, position: int) -> LiveRequest | None:
        """Return the request at a position, counted from 0 in order of turns. None: the list ends before it."""
        return self._requests[position] if position < len(self._requests) else None

    def all(self) -> list[LiveRequest]:
        """Return all requests in order of turns. This is a copy: the caller may remove requests while it walks over it."""
        return list(self._requests)

    def saw_finish(self, now_s: float) -> None:
        """Record that a request ended. These times measure how fast the queue drains."""
        self._finished_s.append(now_s)

    def __len__(self) -> int:
        return len(self._requests)

    def check_invariants(self) -> None:
        """Assert that the list is in order and that the counts of new requests are right."""
        assert self._keys == sorted(set(self._keys))
        assert self._keys == [_key(r) for r in self._requests]
        new = [r for r in self._requests if not r.replay]
        assert (self._new, self._new_tokens) == (len(new), sum(len(r.spec.prompt_ids) for r in new))

    def _retry_after_s(self, now_s: float) -> float:
        """Return how many seconds all waiting requests will take at the rate of the last finishes. Replays are counted, because
        they go first."""
        while self._finished_s and self._finished_s[0] < now_s - RATE_WINDOW_S:
            self._finished_s.popleft()
        if len(self._finished_s) < 2 or now_s <= self._finished_s[0]:
            return RETRY_AFTER_UNKNOWN_S
        drained_per_s = len(self._finished_s) / (now_s - self._finished_s[0])
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, len(self._requests) / drained_per_s))


def _key(request: LiveRequest) -> _Key:
    return (request.times.arrived_s - LEVEL_S * (request.spec.priority + request.replay), request.arrival)
