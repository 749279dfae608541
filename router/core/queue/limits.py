"""The limits of the queue: how many requests may wait for a decode worker, and when a refused client should try again. Pure.

New requests are bounded by count and tokens. Replays are not: each was counted when it was new, and to refuse one would lose
tokens that a client already has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from pdserve.core.errors import Overloaded
from router.core.live_request import LiveRequest

DRAIN_SAMPLES: Final = 64
RETRY_AFTER_MIN_S: Final = 0.1
RETRY_AFTER_MAX_S: Final = 30.0
RETRY_AFTER_UNKNOWN_S: Final = 1.0

RATE_WINDOW_S: Final = 30.0
"""Requests that ended longer ago say nothing about how fast the queue drains now."""


class QueueLimits:
    """Counts what waits, and refuses a new request for which there is no room. It knows nothing of the order."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._waiting = 0
        self._new = 0
        self._new_tokens = 0
        self._finished_s: deque[float] = deque(maxlen=DRAIN_SAMPLES)

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
        """Count a request that begins to wait."""
        self._count(request, 1)

    def remove(self, request: LiveRequest) -> None:
        """Count a request that waits no longer."""
        self._count(request, -1)

    def _count(self, request: LiveRequest, sign: int) -> None:
        self._waiting += sign
        if not request.replay:
            self._new += sign
            self._new_tokens += sign * len(request.spec.prompt_ids)

    def saw_finish(self, now_s: float) -> None:
        """Record that a request ended. These times measure how fast the queue drains."""
        self._finished_s.append(now_s)

    def check_invariants(self, waiting: Iterable[LiveRequest]) -> None:
        """Assert that the counts are those of the requests that wait."""
        all_ = list(waiting)
        new = [r for r in all_ if not r.replay]
        assert self._waiting == len(all_)
        assert (self._new, self._new_tokens) == (len(new), sum(len(r.spec.prompt_ids) for r in new))

    def _retry_after_s(self, now_s: float) -> float:
        """Return how many seconds all waiting requests will take at the rate of the last finishes. Replays are counted, because
        they go first."""
        while self._finished_s and self._finished_s[0] < now_s - RATE_WINDOW_S:
            self._finished_s.popleft()
        if len(self._finished_s) < 2 or now_s <= self._finished_s[0]:
            return RETRY_AFTER_UNKNOWN_S
        drained_per_s = len(self._finished_s) / (now_s - self._finished_s[0])
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, self._waiting / drained_per_s))
