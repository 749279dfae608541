"""The queue by client: how much of the queue each client, connection and call has, and which one has most. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pdserve.core.ids import RequestId
from router.core.live_request import LiveRequest
from router.core.queue.flows import Path


@dataclass(slots=True, eq=False)
class Share:
    """The new requests that wait of one client, connection or call, and their prompt tokens."""

    requests: dict[RequestId, LiveRequest] = field(default_factory=dict)
    """The oldest one is first."""
    tokens: int = 0
    below: dict[str, Share] = field(default_factory=dict)
    heap: list[tuple[float, str]] = field(default_factory=list)
    """For each share below, an entry (less its load, its name) of a load that it has or had and is not below it now."""

    def load(self, max_requests: int, max_tokens: int, *, requests: int = 0, tokens: int = 0) -> float:
        """Return the part of the queue that it has, by what is scarcer for it, with so much added."""
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
        """Return the share below that has most, of those that there are. A look at all of them would take 50 ms at 65,536."""
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
        """Return the share of a client. It is empty for one of whom nothing waits."""
        return self._root.below.get(client) or Share()

    def add(self, request: LiveRequest) -> None:
        """Count a request. One whose client is not known counts nowhere."""
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
        """Yield the requests that give way to a new one of `client`, the youngest first: those of the client that has most, as
        long as it still has no less than the new one's then. If that is its own client, connections are compared, and then
        calls. Nobody gives way to a client that is not known, or to a class of lower `priority` than its own."""
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
        """Assert that the shares are those of the new requests that wait."""
        waiting = list(new)
        for depth in range(3):
            counted = {one.request_id for share in self._at(depth) for one in share.requests.values()}
            assert counted == {one.request_id for one in waiting if len(one.client) > depth}
        for share in (share for depth in range(3) for share in self._at(depth)):
            assert share.requests
            assert share.tokens == sum(one.new_prompt_tokens for one in share.requests.values())
        for share in (self._root, *self._at(0), *self._at(1)):
            if share.below:
                assert share.heaviest(self._max)[1].load(*self._max) == max(o.load(*self._max) for o in share.below.values())

    def _at(self, depth: int) -> list[Share]:
        found = [self._root]
        for _ in range(depth + 1):
            found = [below for share in found for below in share.below.values()]
        return found
