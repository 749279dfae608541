"""The deadlines of live requests, soonest first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Final

from pdserve.core.ids import RequestId
from router.core.live_request import LiveRequest

STALE_MIN: Final = 1024
"""Ended requests leave stale deadlines in the heap. The heap is rebuilt when it holds this many more than twice the live
requests."""


class Deadlines:
    """A heap of the deadlines of `requests`."""

    def __init__(self, requests: Mapping[RequestId, LiveRequest]) -> None:
        self._requests = requests
        self._heap: list[tuple[float, int, RequestId]] = []

    def __len__(self) -> int:
        """Return the number of deadlines in the heap, including those of ended requests."""
        return len(self._heap)

    def add(self, request: LiveRequest) -> None:
        """Add the deadline of a live request."""
        heapq.heappush(self._heap, (request.deadline_s, request.arrival, request.request_id))

    def passed(self, *, now_s: float) -> Iterator[LiveRequest]:
        """Yield the live requests whose deadline has passed, each once."""
        while self._heap and self._heap[0][0] <= now_s:
            _, arrival, request_id = heapq.heappop(self._heap)
            request = self._requests.get(request_id)
            if request is not None and request.arrival == arrival:
                yield request
        if len(self._heap) > 2 * len(self._requests) + STALE_MIN:
            self._heap = [(r.deadline_s, r.arrival, r.request_id) for r in self._requests.values()]
            heapq.heapify(self._heap)
