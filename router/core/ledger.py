"""The ledger: how much KV the router believes each decode worker has promised. It is an estimate, never an authority.

A worker reserves whole or answers NoRoom; the ledger only keeps the router from asking in vain. Every entry is taken once and
returned once, and the sum of each worker's entries must equal what the worker is charged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import InternalBug
from pdserve.core.ids import RequestId
from router.core.events import LinkId

MEAN_WEIGHT: Final = 0.02
"""The weight of the newest stay in the running mean. The mean forgets half of the past in 34 requests."""


class StayMean:
    """A running mean of the time that a finished request was on its decode worker."""

    def __init__(self) -> None:
        self._mean_s = 0.0

    def saw(self, stay_s: float) -> None:
        """Count a finished request. The first request sets the mean."""
        self._mean_s += (MEAN_WEIGHT if self._mean_s else 1.0) * (stay_s - self._mean_s)

    def drained_per_s(self, running: int) -> float:
        """Return how many of the `running` requests end in a second: by Little's law their number divided by the mean stay. It
        does not depend on how busy the cluster was before. 0: unknown."""
        return running / self._mean_s if self._mean_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """The KV tokens that one request probably takes on one decode worker."""

    link: LinkId
    tokens: int
    passed: bool = False
    """The request passed another request that waits for this worker."""


class Ledger:
    """The entries by request, and their sum by worker."""

    def __init__(self, note: Callable[[LinkId], None] = lambda link: None) -> None:
        """`note` is called with each worker whose charge changes."""
        self._note = note
        self._entries: dict[RequestId, Entry] = {}
        self._charged: dict[LinkId, int] = {}
        self._passed: dict[LinkId, int] = {}

    def take(self, request_id: RequestId, link: LinkId, tokens: int, *, passed: bool = False) -> None:
        """Charge a worker for a request. Raises `InternalBug` if the request already has an entry."""
        if request_id in self._entries:
            raise InternalBug(f"request {request_id} already has a ledger entry: {self._entries[request_id]}")
        self._entries[request_id] = Entry(link, tokens, passed)
        self._charged[link] = self._charged.get(link, 0) + tokens
        if passed:
            self._passed[link] = self.passed(link) + tokens
        self._note(link)

    def give_back(self, request_id: RequestId) -> None:
        """Remove the entry of a request. Raises `InternalBug` if it has none."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            raise InternalBug(f"request {request_id} has no ledger entry to return")
        self._charged[entry.link] -= entry.tokens
        if self._charged[entry.link] == 0:
            del self._charged[entry.link]
        if entry.passed:
            self._passed[entry.link] -= entry.tokens
            if self._passed[entry.link] == 0:
                del self._passed[entry.link]
        self._note(entry.link)

    def has(self, request_id: RequestId) -> bool:
        """Tell whether the request has an entry."""
        return request_id in self._entries

    def link_of(self, request_id: RequestId) -> LinkId | None:
        """Return the worker that is charged for the request, or None when it has no entry."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.link

    def charged(self, link: LinkId) -> int:
        """Return the KV tokens promised on that worker."""
        return self._charged.get(link, 0)

    def passed(self, link: LinkId) -> int:
        """Return the KV tokens of the worker that are promised to requests which went before a request that waits for it."""
        return self._passed.get(link, 0)

    def __len__(self) -> int:
        return len(self._entries)

    def check_invariants(self) -> None:
        """Assert that the sum of each worker's entries equals what it is charged."""
        sums: dict[LinkId, int] = {}
        for entry in self._entries.values():
            assert entry.tokens > 0
            sums[entry.link] = sums.get(entry.link, 0) + entry.tokens
        assert sums == self._charged
        for link in sums.keys() | self._passed.keys():
            assert self.passed(link) == sum(e.tokens for e in self._entries.values() if e.link == link and e.passed)
