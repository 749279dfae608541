"""Requests that wait for room on a decode worker, in the order of their turns.

A turn is the moment of arrival, so much earlier for each level of priority: a larger priority overtakes what came before
it, and what waits is overtaken by those alone that come within that time, so no priority waits for ever. A replay counts as
one level more.

New ones are bounded by count and tokens. Replays are not: each was counted when it was new, and refusing one would lose
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
"""Finishes older than this say nothing about how fast the queue drains now."""

LEVEL_S: Final = 3.0
"""What one level of priority is worth: all two hundred outweigh the default deadline of 600 s."""

_Key = tuple[float, int]


class WaitingRequests:
    """An ordered list: at most `max_requests`, so that insertion by bisection is cheap."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._keys: list[_Key] = []
        self._requests: list[LiveRequest] = []
        self._new = 0
        self._new_tokens = 0
        self._finished_s: deque[float] = deque(maxlen=DRAIN_SAMPLES)

    def check_room(self, prompt_tokens: int, *, now_s: float) -> None:
        """Raises `Overloaded` when one more request of so many tokens may not wait. With nothing new in it, any may."""
        full = self._new >= self._max_requests
        if full or (self._new and self._new_tokens + prompt_tokens > self._max_tokens):
            raise Overloaded(
                f"{self._new} requests with {self._new_tokens} prompt tokens are waiting; "
                f"at most {self._max_requests} requests and {self._max_tokens} tokens may",
                retry_after_s=self._retry_after_s(now_s),
            )

    def add(self, request: LiveRequest) -> None:
        key = _key(request)
        position = bisect.bisect_left(self._keys, key)
        self._keys.insert(position, key)
        self._requests.insert(position, request)
        self._count(request, 1)

    def remove(self, request: LiveRequest) -> None:
        position = bisect.bisect_left(self._keys, _key(request))
        assert self._requests[position] is request
        del self._keys[position], self._requests[position]
        self._count(request, -1)

    def _count(self, request: LiveRequest, sign: int) -> None:
        if not request.replay:
            self._new += sign
            self._new_tokens += sign * len(request.prompt_ids)

    def at(self, position: int) -> LiveRequest | None:
        """In order, from 0; None past the end."""
        return self._requests[position] if position < len(self._requests) else None

    def all(self) -> list[LiveRequest]:
        """In order; a copy, so that the caller may remove while it walks."""
        return list(self._requests)

    def saw_finish(self, now_s: float) -> None:
        """A request ended: what the drain rate is measured by."""
        self._finished_s.append(now_s)

    def __len__(self) -> int:
        return len(self._requests)

    def check_invariants(self) -> None:
        assert self._keys == sorted(set(self._keys))
        assert self._keys == [_key(r) for r in self._requests]
        new = [r for r in self._requests if not r.replay]
        assert (self._new, self._new_tokens) == (len(new), sum(len(r.prompt_ids) for r in new))

    def _retry_after_s(self, now_s: float) -> float:
        """How long all that wait now will take, replays too since they go first, at the rate of the last finishes."""
        while self._finished_s and self._finished_s[0] < now_s - RATE_WINDOW_S:
            self._finished_s.popleft()
        if len(self._finished_s) < 2 or now_s <= self._finished_s[0]:
            return RETRY_AFTER_UNKNOWN_S
        drained_per_s = len(self._finished_s) / (now_s - self._finished_s[0])
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, len(self._requests) / drained_per_s))


def _key(request: LiveRequest) -> _Key:
    return (request.times.arrived_s - LEVEL_S * (request.priority + request.replay), request.arrival)
