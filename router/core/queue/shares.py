"""The queue by client: how much of the queue each client, connection and call has, and which one has most. Pure."""

from __future__ import annotations

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

    def load(self, max_requests: int, max_tokens: int, *, requests: int = 0, tokens: int = 0) -> float:
        """Return the part of the queue that it has, by what is scarcer for it, with so much added."""
        return max((len(self.requests) + requests) / max_requests, (self.tokens + tokens) / max_tokens)


class Shares:
    """The shares of all clients that are known."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._max = max_requests, max_tokens
        self._root = Share()

    def resize(self, max_requests: int, max_tokens: int) -> None:
        """Set other bounds of the queue, of which the shares are parts."""
        self._max = max_requests, max_tokens

    def of(self, client: str) -> Share:
        """Return the share of a client. It is empty for one of whom nothing waits."""
        return self._root.below.get(client) or Share()

    def add(self, request: LiveRequest) -> None:
        """Count a request. One whose client is not known counts nowhere."""
        share, tokens = self._root, request.new_prompt_tokens
        for name in request.client:
            share = share.below.setdefault(name, Share())
            share.requests[request.request_id] = request
            share.tokens += tokens

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
            heaviest, share = max(parent.below.items(), key=lambda item: item[1].load(*self._max))
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

    def _at(self, depth: int) -> list[Share]:
        found = [self._root]
        for _ in range(depth + 1):
            found = [below for share in found for below in share.below.values()]
        return found
