"""Requests that wait for room on a decode worker, in the order of their turns.

A turn is the time of arrival, less `LEVEL_S` for each level of priority. A request of higher priority overtakes earlier ones,
but only those that came at most that time before it, so no request waits for ever. A replay counts as one level more.
"""

from __future__ import annotations

import bisect
from typing import Final

from router.core.live_request import LiveRequest

LEVEL_S: Final = 3.0
"""The seconds that one level of priority is worth. All two hundred levels outweigh the default deadline of 600 s."""

_Key = tuple[float, int]


class WaitingRequests:
    """An ordered list. `QueueLimits` bounds it, so insertion by bisection is cheap."""

    def __init__(self) -> None:
        self._keys: list[_Key] = []
        self._requests: list[LiveRequest] = []
        self.added = 0
        """The number of times that a request began to wait."""

    def add(self, request: LiveRequest) -> None:
        """Insert a request at its turn."""
        key = _key(request)
        position = bisect.bisect_left(self._keys, key)
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
        del self._keys[position], self._requests[position]

    def at(self, position: int) -> LiveRequest | None:
        """Return the request at a position, counted from 0 in order of turns. None: the list ends before it."""
        return self._requests[position] if position < len(self._requests) else None

    def ahead_of(self, request: LiveRequest) -> int:
        """Count the requests whose turn is before that of a request, which need not wait here."""
        return bisect.bisect_left(self._keys, _key(request))

    def all(self) -> list[LiveRequest]:
        """Return all requests in order of turns. This is a copy: the caller may remove requests while it walks over it."""
        return list(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def check_invariants(self) -> None:
        """Assert that the list is in order."""
        assert self._keys == sorted(set(self._keys))
        assert self._keys == [_key(r) for r in self._requests]


def _key(request: LiveRequest) -> _Key:
    return (request.times.arrived_s - LEVEL_S * (request.spec.priority + request.replay), request.arrival)
