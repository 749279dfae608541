"""The limits of the queue: how many requests may wait for a decode worker, which give way to others, and when a refused client
should try again. Pure.

New requests are bounded by count and tokens, all together and by class. A full queue makes room for a class of higher priority:
the youngest requests of the lowest class are shed. If that is not enough, the client that has most gives way to one that has
less, so a burst of one client keeps nobody else out. Replays are neither bounded nor shed: each was counted when it was new,
and to end one would lose tokens that a client already has. Siblings come with their leader: they are counted, without the
prompt that they share, and never refused.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

from pdserve.core.errors import Overloaded
from pdserve.core.ids import RequestId
from pdserve.core.slo import SloClass
from router.core.live_request import LiveRequest
from router.core.queue.flows import Path
from router.core.queue.shares import Shares

DRAIN_SAMPLES: Final = 64
RETRY_AFTER_MIN_S: Final = 0.1
RETRY_AFTER_MAX_S: Final = 30.0
RETRY_AFTER_UNKNOWN_S: Final = 1.0

RATE_WINDOW_S: Final = 30.0
"""Requests that ended longer ago say nothing about how fast the queue drains now."""

MAX_SHED: Final = 16
"""At most this many requests give way to one. A long prompt would otherwise end hundreds of short ones."""

CLASS_SHARE: Final = "class_share"
CLIENT_SHARE: Final = "client_share"
SHED: Final = "shed"
"""The reasons of `Overloaded` that metrics count apart."""


@dataclass(slots=True)
class _Class:
    """The new requests of one class that wait, and their prompt tokens."""

    slo: SloClass
    requests: dict[RequestId, LiveRequest] = field(default_factory=dict)
    tokens: int = 0


class QueueLimits:
    """Counts what waits, and says whether a new request may wait. It knows nothing of the order of turns."""

    def __init__(self, *, max_requests: int, max_tokens: int, client_share: float = 1.0) -> None:
        """`client_share`: the requests of one client may fill this share of the queue."""
        self._client_share = client_share
        self._clients = Shares(max_requests, max_tokens)
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.bound = 0
        """The number of requests that were refused or shed because the queue was full."""
        self._replays: set[RequestId] = set()
        self._new = 0
        self._new_tokens = 0
        self._classes: dict[str, _Class] = {}
        self._finished_s: deque[float] = deque(maxlen=DRAIN_SAMPLES)

    def resize(self, *, max_requests: int, max_tokens: int) -> None:
        """Set other bounds. What waits already goes on waiting."""
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._clients.resize(max_requests, max_tokens)

    def make_room(self, slo: SloClass, prompt_tokens: int, *, now_s: float, client: Path = ()) -> list[LiveRequest]:
        """Return the requests that must be shed so that a new request of `prompt_tokens` may wait. Raises `Overloaded` if it
        may not wait in any case, and then nothing is to be shed. Its tokens are not counted when nothing else waits, or for the
        share of its class when no other of its class waits."""
        self._check_share(slo, prompt_tokens, now_s)
        self._check_client(client, prompt_tokens, now_s)
        if self._fits(self._new, self._new_tokens, prompt_tokens):
            return []
        for giving_way in (self._lowest(slo.priority), self._clients.giving_way(client, prompt_tokens, slo.priority)):
            shed: list[LiveRequest] = []
            requests, tokens = self._new, self._new_tokens
            for request in islice(giving_way, MAX_SHED):
                shed.append(request)
                requests, tokens = requests - 1, tokens - request.new_prompt_tokens
                if self._fits(requests, tokens, prompt_tokens):
                    self.bound += len(shed)
                    return shed
        self.bound += 1
        raise Overloaded(
            f"{self._new} requests with {self._new_tokens} prompt tokens are waiting; "
            f"at most {self._max_requests} requests and {self._max_tokens} tokens may wait",
            retry_after_s=self.retry_after_s(now_s),
        )

    def _check_client(self, client: Path, prompt_tokens: int, now_s: float) -> None:
        if not client or self._client_share >= 1.0:
            return
        mine = self._clients.of(client[0])
        count, max_requests = len(mine.requests), max(1, int(self._max_requests * self._client_share))
        max_tokens = int(self._max_tokens * self._client_share)
        if count >= max_requests or (count and mine.tokens + prompt_tokens > max_tokens):
            raise Overloaded(
                f"{count} requests of this client with {mine.tokens} prompt tokens are waiting; "
                f"at most {max_requests} requests and {max_tokens} tokens of one client may wait",
                retry_after_s=self.retry_after_s(now_s),
                reason=CLIENT_SHARE,
            )

    def _fits(self, requests: int, tokens: int, more_tokens: int) -> bool:
        return requests < self._max_requests and (not requests or tokens + more_tokens <= self._max_tokens)

    def _check_share(self, slo: SloClass, prompt_tokens: int, now_s: float) -> None:
        mine = self._classes.get(slo.name)
        if mine is None or slo.queue_share >= 1.0:
            return
        count, max_requests = len(mine.requests), max(1, int(self._max_requests * slo.queue_share))
        max_tokens = int(self._max_tokens * slo.queue_share)
        if count >= max_requests or (count and mine.tokens + prompt_tokens > max_tokens):
            raise Overloaded(
                f"{count} requests of class {slo.name!r} with {mine.tokens} prompt tokens are waiting; "
                f"at most {max_requests} requests and {max_tokens} tokens of it may wait",
                retry_after_s=self.retry_after_s(now_s),
                reason=CLASS_SHARE,
            )

    def _lowest(self, priority: int) -> list[LiveRequest]:
        """Return the requests that may be shed for a class of this priority, those of the lowest class first, and of them the
        youngest first."""
        below = [one.requests.values() for one in self._classes.values() if one.slo.priority < priority]
        return heapq.nsmallest(MAX_SHED, chain.from_iterable(below), key=lambda r: (r.slo.priority, -r.arrival))

    def add(self, request: LiveRequest) -> None:
        """Count a request that begins to wait."""
        if request.replay:
            self._replays.add(request.request_id)
            return
        mine = self._classes.get(request.slo.name)
        if mine is None:
            mine = self._classes[request.slo.name] = _Class(request.slo)
        tokens = request.new_prompt_tokens
        self._clients.add(request)
        mine.requests[request.request_id] = request
        mine.tokens += tokens
        self._new += 1
        self._new_tokens += tokens

    def remove(self, request: LiveRequest) -> None:
        """Forget a request that waits no longer. Nothing happens if it is not counted, so a broken removal may be repeated."""
        self._replays.discard(request.request_id)
        self._clients.remove(request)
        mine = self._classes.get(request.slo.name)
        if mine is not None and mine.requests.pop(request.request_id, None) is not None:
            tokens = request.new_prompt_tokens
            mine.tokens -= tokens
            self._new -= 1
            self._new_tokens -= tokens

    def saw_finish(self, now_s: float) -> None:
        """Record that a request ended. These times measure how fast the queue drains."""
        self._finished_s.append(now_s)

    def retry_after_s(self, now_s: float) -> float:
        """Return how many seconds all waiting requests will take at the rate of the last finishes. Replays are counted, because
        they go first."""
        while self._finished_s and self._finished_s[0] < now_s - RATE_WINDOW_S:
            self._finished_s.popleft()
        if len(self._finished_s) < 2 or now_s <= self._finished_s[0]:
            return RETRY_AFTER_UNKNOWN_S
        drained_per_s = len(self._finished_s) / (now_s - self._finished_s[0])
        return min(RETRY_AFTER_MAX_S, max(RETRY_AFTER_MIN_S, (self._new + len(self._replays)) / drained_per_s))

    def check_invariants(self, waiting: Iterable[LiveRequest]) -> None:
        """Assert that the counts are those of the requests that wait."""
        all_ = list(waiting)
        new = [r for r in all_ if not r.replay]
        assert self._replays == {r.request_id for r in all_ if r.replay}
        assert (self._new, self._new_tokens) == (len(new), sum(r.new_prompt_tokens for r in new))
        assert sum(len(one.requests) for one in self._classes.values()) == len(new)
        self._clients.check_invariants(new)
        for name, one in self._classes.items():
            assert set(one.requests) == {r.request_id for r in new if r.slo.name == name}
            assert one.tokens == sum(r.new_prompt_tokens for r in one.requests.values())
