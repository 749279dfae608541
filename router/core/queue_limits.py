"""The limits of the queue: how many requests may wait for a decode worker, which give way to others, and when a refused client
should try again. Pure.

New requests are bounded by count and tokens, all together and by class. A full queue makes room for a class of higher priority:
the youngest requests of the lowest class are shed. If that is not enough, the client with the most waiting requests gives way
to a client with fewer, so a burst of one client keeps no other client out. Replays are neither bounded nor shed: each was
counted when it was new, and a shed replay would waste tokens that its client already has. Siblings come with their leader: they
are counted, without the prompt that they share, and never refused.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Final

from pdserve.config import MIB, RouterConfig
from pdserve.core.errors import Overloaded
from pdserve.core.ids import RequestId
from pdserve.core.slo import SloClass
from pdserve.core.worker import Role, WorkerHello
from router.core.live_request import LiveRequest
from router.core.turns import Path

# Shares ----------------------------------------------------------------------------------------------------------
#
# The queue by client: how much of the queue each client, connection and call fills, and which of them fills most. Pure.


@dataclass(slots=True, eq=False)
class Share:
    """The waiting new requests of one client, connection or call, and their prompt tokens."""

    requests: dict[RequestId, LiveRequest] = field(default_factory=dict)
    """The oldest request is first."""
    tokens: int = 0
    below: dict[str, Share] = field(default_factory=dict)
    heap: list[tuple[float, str]] = field(default_factory=list)
    """Each share below has an entry (-load, name), whose load is the present load of the share or an earlier, higher load."""

    def load(self, max_requests: int, max_tokens: int, *, requests: int = 0, tokens: int = 0) -> float:
        """Return the part of the queue that the share fills, with `requests` and `tokens` added: of requests or of tokens,
        whichever part is larger."""
        return max((len(self.requests) + requests) / max_requests, (self.tokens + tokens) / max_tokens)

    def note(self, name: str, most: tuple[int, int]) -> None:
        """Note that a share below has grown."""
        heapq.heappush(self.heap, (-self.below[name].load(*most), name))
        if len(self.heap) > 2 * len(self.below) + 64:
            self.note_all(most)

    def note_all(self, most: tuple[int, int]) -> None:
        """Note all shares below anew."""
        self.heap = [(-share.load(*most), name) for name, share in self.below.items()]
        heapq.heapify(self.heap)

    def heaviest(self, most: tuple[int, int]) -> tuple[str, Share]:
        """Return the largest share below. There must be one. A look at all shares would take 50 ms at 65,536."""
        while True:
            load, name = self.heap[0]
            share = self.below.get(name)
            if share is None:
                heapq.heappop(self.heap)
            elif (now := -share.load(*most)) == load:
                return name, share
            else:
                heapq.heapreplace(self.heap, (now, name))


class Shares:
    """The shares of all clients that are known."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max = max_requests, max_tokens
        self._root = Share()

    def resize(self, max_requests: int, max_tokens: int) -> None:
        """Set other bounds of the queue, of which the shares are parts."""
        if self._max == (max_requests, max_tokens):
            return
        self._max = max_requests, max_tokens
        for share in (self._root, *self._at(0), *self._at(1)):
            share.note_all(self._max)

    def of(self, client: str) -> Share:
        """Return the share of a client. It is empty for a client without waiting requests."""
        return self._root.below.get(client) or Share()

    def add(self, request: LiveRequest) -> None:
        """Count a request. A request whose client is unknown is not counted."""
        share, tokens = self._root, request.new_prompt_tokens
        for name in request.client:
            parent, share = share, share.below.setdefault(name, Share())
            share.requests[request.request_id] = request
            share.tokens += tokens
            parent.note(name, self._max)

    def remove(self, request: LiveRequest) -> None:
        """Forget a request. Nothing happens where it is not counted, so a broken removal may be repeated."""
        parent, tokens = self._root, request.new_prompt_tokens
        for name in request.client:
            share = parent.below.get(name)
            if share is None:
                return
            if share.requests.pop(request.request_id, None) is not None:
                share.tokens -= tokens
            if not share.requests:
                del parent.below[name]
            parent = share

    def giving_way(self, client: Path, tokens: int, priority: int) -> Iterator[LiveRequest]:
        """Yield the requests that give way to a new request of `client`, the youngest first. They belong to the client with the
        largest share, which keeps at least as large a share as `client` then has. If `client` itself has the largest share, its
        connections are compared, and then its calls. No request gives way to an unknown client, or to a class of lower
        `priority` than its own."""
        parent = self._root
        for name in client:
            if not parent.below:
                return
            heaviest, share = parent.heaviest(self._max)
            if heaviest != name:
                mine = (parent.below.get(name) or Share()).load(*self._max, requests=1, tokens=tokens)
                yield from self._youngest(share, mine, priority)
                return
            parent = share

    def _youngest(self, share: Share, mine: float, priority: int) -> Iterator[LiveRequest]:
        requests = freed = 0
        for request in reversed(share.requests.values()):
            requests, freed = requests + 1, freed + request.new_prompt_tokens
            if share.load(*self._max, requests=-requests, tokens=-freed) < mine:
                return
            if request.slo.priority <= priority:
                yield request

    def check_invariants(self, new: Iterable[LiveRequest]) -> None:
        """Assert that the shares equal the sums over the waiting new requests."""
        waiting = list(new)
        for depth in range(3):
            counted = {request.request_id for share in self._at(depth) for request in share.requests.values()}
            assert counted == {request.request_id for request in waiting if len(request.client) > depth}
        for share in (share for depth in range(3) for share in self._at(depth)):
            assert share.requests
            assert share.tokens == sum(request.new_prompt_tokens for request in share.requests.values())
        for share in (self._root, *self._at(0), *self._at(1)):
            if share.below:
                assert share.heaviest(self._max)[1].load(*self._max) == max(s.load(*self._max) for s in share.below.values())

    def _at(self, depth: int) -> list[Share]:
        found = [self._root]
        for _ in range(depth + 1):
            found = [below for share in found for below in share.below.values()]
        return found


# Derived limits --------------------------------------------------------------------------------------------------
#
# Limits that follow the linked workers, where the settings name no number. Pure.
#
# A number that suits four workers refuses the clients of forty. What may wait is a multiple of what the workers can serve. A
# floor serves a cluster whose workers have not joined yet, and a ceiling bounds the router's memory.


QUEUE_TURNS: Final = 4
"""The queue's limit is this multiple of the requests that the decode workers run at once: a client waits at most a few times as
long as it is served."""
MIN_QUEUED_REQUESTS: Final = 1024
MAX_QUEUED_REQUESTS: Final = 1 << 16  # 20 KiB each besides the prompt: 1.3 GiB
MIN_QUEUED_TOKENS: Final = 1 << 20
MAX_QUEUED_TOKENS: Final = 1 << 24  # 36 bytes each: 0.6 GiB
LONG_PROMPTS: Final = 32
"""The number of prompts of the longest length that may wait in any case: a token limit that eight prompts fill would be a limit
of requests."""
KEY_BYTES: Final = 216
"""A key of the index, its mask of up to 60 workers and its one holder (`prefix_index.index`)."""
MIN_INDEX_BYTES: Final = 256 * MIB
MAX_INDEX_BYTES: Final = 2048 * MIB  # 10 million blocks: 200 pools of 49,152
MIN_STREAMS: Final = 1024


@dataclass(frozen=True, slots=True)
class PresentLimits:
    """The limits that hold now."""

    queued_requests: int
    queued_tokens: int
    index_bytes: int
    streams: int
    """The connections that clients can use at once, if each has one stream: for running and for waiting requests."""


class DerivedLimits:
    """The sums over the linked workers, and the limits that follow from them. A number in the settings is the limit, whoever is
    linked."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._slots = self._blocks = self._kv_tokens = 0
        self._lengths: Counter[int] = Counter()
        self._index_bytes = 0

    def join(self, hello: WorkerHello) -> None:
        """Add a worker."""
        self._add(hello, 1)

    def leave(self, hello: WorkerHello) -> None:
        """Take a worker away that was added."""
        self._add(hello, -1)

    def _add(self, hello: WorkerHello, sign: int) -> None:
        self._blocks += sign * hello.num_blocks
        if hello.role is Role.DECODE:
            self._slots += sign * hello.max_num_seqs
            self._kv_tokens += sign * hello.num_blocks * hello.block_size
            self._lengths[hello.max_model_len] += sign
            if not self._lengths[hello.max_model_len]:
                del self._lengths[hello.max_model_len]

    def now(self) -> PresentLimits:
        """Return the limits that hold now. The index never shrinks: when a worker dials again, it would forget what is true,
        and the memory was affordable."""
        config = self._config
        tokens = max(self._kv_tokens, LONG_PROMPTS * max(self._lengths, default=0))
        self._index_bytes = max(self._index_bytes, _within(KEY_BYTES * self._blocks, MIN_INDEX_BYTES, MAX_INDEX_BYTES))
        requests = config.max_queued_requests
        if requests is None:
            requests = _within(QUEUE_TURNS * self._slots, MIN_QUEUED_REQUESTS, MAX_QUEUED_REQUESTS)
        return PresentLimits(
            queued_requests=requests,
            queued_tokens=config.max_queued_tokens or _within(tokens, MIN_QUEUED_TOKENS, MAX_QUEUED_TOKENS),
            index_bytes=self._index_bytes if config.prefix_index_bytes is None else config.prefix_index_bytes,
            streams=max(MIN_STREAMS, self._slots + requests),
        )


def _within(value: int, floor: int, ceiling: int) -> int:
    return max(floor, min(ceiling, value))


# The limits of the queue -----------------------------------------------------------------------------------------


DRAIN_SAMPLES: Final = 64
RETRY_AFTER_MIN_S: Final = 0.1
RETRY_AFTER_MAX_S: Final = 30.0
RETRY_AFTER_UNKNOWN_S: Final = 1.0

RATE_WINDOW_S: Final = 30.0
"""Requests that ended longer ago say nothing about how fast the queue drains now."""

MAX_SHED: Final = 16
"""The most requests that give way to one request. A long prompt would otherwise end hundreds of short requests."""

CLASS_SHARE: Final = "class_share"
CLIENT_SHARE: Final = "client_share"
SHED: Final = "shed"
"""The reasons of `Overloaded` that metrics count apart."""


@dataclass(slots=True)
class _Class:
    """The waiting new requests of one class, and their prompt tokens."""

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
        """Return the requests that must be shed so that a new request of `prompt_tokens` may wait. Raises `Overloaded` if the
        request may not wait in any case; then no request is to be shed. Its tokens are not counted when no other request waits.
        For the share of its class they are not counted when no other request of the class waits."""
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
        """Return the requests that may be shed for a class of this priority: the lowest class first, and within a class the
        youngest first."""
        below = [queued.requests.values() for queued in self._classes.values() if queued.slo.priority < priority]
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
        """Assert that the counts equal the sums over the waiting requests."""
        all_ = list(waiting)
        new = [r for r in all_ if not r.replay]
        assert self._replays == {r.request_id for r in all_ if r.replay}
        assert (self._new, self._new_tokens) == (len(new), sum(r.new_prompt_tokens for r in new))
        assert sum(len(queued.requests) for queued in self._classes.values()) == len(new)
        self._clients.check_invariants(new)
        for name, queued in self._classes.items():
            assert set(queued.requests) == {r.request_id for r in new if r.slo.name == name}
            assert queued.tokens == sum(r.new_prompt_tokens for r in queued.requests.values())
