"""Requests that wait for room on a decode worker: larger priority first, then arrival. Bounded by count and tokens."""

from __future__ import annotations

import bisect
from collections import deque
from typing import Final

from pdserve.core.errors import Overloaded
from router.live import LiveRequest

DRAIN_SAMPLES: Final = 64
RETRY_AFTER_MIN_S: Final = 0.1
RETRY_AFTER_MAX_S: Final = 30.0
RETRY_AFTER_UNKNOWN_S: Final = 1.0

_Key = tuple[int, int]


class WaitingRequests:
    """An ordered list: at most `max_requests`, so that insertion by bisection is cheap."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._keys: list[_Key] = []
        self._requests: list[LiveRequest] = []
        self._tokens = 0
        self._finished_s: deque[float] = deque(maxlen=DRAIN_SAMPLES)

    def check_room(self, prompt_tokens: int, *, now_s: float) -> None:
        """Raises `Overloaded` when one more request of so many tokens may not wait. An empty list takes any."""
        full = len(self._requests) >= self._max_requests
        if full or (self._requests and self._tokens + prompt_tokens > self._max_tokens):
            raise Overloaded(
                f"{len(self._requests)} requests with {self._tokens} prompt tokens are waiting; "
                f"at most {self._max_requests} requests and {self._max_tokens} tokens may",
                retry_after_s=self._retry_after_s(now_s),
            )

    def add(self, request: LiveRequest) -> None:
        key = _key(request)
        position = bisect.bisect_left(self._keys, key)
        self._keys.insert(position, key)
        self._requests.insert(position, request)
        self._tokens += len(request.prompt_ids)

    def remove(self, request: LiveRequest) -> None:
        position = bisect.bisect_left(self._keys, _key(request))
        assert self._requests[position] is request
        del self._keys[position], self._requests[position]
        self._tokens -= len(request.prompt_ids)

    def first(self) -> LiveRequest | None:
        return self._requests[0] if self._requests else None

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
        assert self._tokens == sum(len(r.prompt_ids) for r in self._requests)

    def _retry_after_s(self, now_s: float) -> float:
        """How long the requests that wait now will take, at the rate of the last finishes."""
        if len(self._finished_s) < 2 or now_s <= self._finished_s[0]:
            return RETRY_AFTER_UNKNOWN_S
        drained_per_s = len(self._finished_s) / (now_s - self._finished_s[0])
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, len(self._requests) / drained_per_s))


def _key(request: LiveRequest) -> _Key:
    return (-request.priority, request.arrival)
