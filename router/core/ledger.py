"""The ledger: how much KV the router believes each decode worker has promised. An estimate, never an authority.

A worker reserves whole or answers NoRoom; the ledger only keeps the router from asking in vain. Every entry is taken
once and returned once, and both sides of the book are checked to agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import InternalBug
from pdserve.core.ids import RequestId
from router.core.events import LinkId

PRIOR_OUTPUT_TOKENS: Final = 128.0
"""A guess, until something has finished; a wrong one costs a NoRoom or a short wait."""
MEAN_WEIGHT: Final = 0.02
"""Of the newest output in the running mean: it forgets half of the past in 34 requests."""


class OutputMean:
    """A running mean of how many tokens this model puts out."""

    def __init__(self) -> None:
        self._mean = PRIOR_OUTPUT_TOKENS

    def saw(self, output_tokens: int) -> None:
        self._mean += MEAN_WEIGHT * (output_tokens - self._mean)

    def expect(self, max_tokens: int) -> int:
        """Tokens that a request of at most `max_tokens` will probably put out."""
        return max(1, min(max_tokens, round(self._mean)))


@dataclass(frozen=True, slots=True)
class Entry:
    link: LinkId
    tokens: int


class Ledger:
    """Entries by request; the sum by worker."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, Entry] = {}
        self._charged: dict[LinkId, int] = {}

    def take(self, request_id: RequestId, link: LinkId, tokens: int) -> None:
        if request_id in self._entries:
            raise InternalBug(f"request {request_id} already has a ledger entry: {self._entries[request_id]}")
        self._entries[request_id] = Entry(link, tokens)
        self._charged[link] = self._charged.get(link, 0) + tokens

    def give_back(self, request_id: RequestId) -> None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            raise InternalBug(f"request {request_id} has no ledger entry to return")
        self._charged[entry.link] -= entry.tokens
        if self._charged[entry.link] == 0:
            del self._charged[entry.link]

    def has(self, request_id: RequestId) -> bool:
        return request_id in self._entries

    def link_of(self, request_id: RequestId) -> LinkId | None:
        """Where it is charged; None when it has no entry."""
        entry = self._entries.get(request_id)
        return None if entry is None else entry.link

    def charged(self, link: LinkId) -> int:
        """KV tokens promised on that worker."""
        return self._charged.get(link, 0)

    def __len__(self) -> int:
        return len(self._entries)

    def check_invariants(self) -> None:
        sums: dict[LinkId, int] = {}
        for entry in self._entries.values():
            assert entry.tokens > 0
            sums[entry.link] = sums.get(entry.link, 0) + entry.tokens
        assert sums == self._charged
