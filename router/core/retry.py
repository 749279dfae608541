"""How many retries the cluster can afford. Pure."""

from __future__ import annotations

from typing import Final

from pdserve.core.errors import Overloaded, PdserveError

REMEMBERED_REQUESTS: Final = 10_000
"""A quiet week must not save up for a storm: the share of at most so many requests is kept."""


class RetryBucket:
    """Each admitted request puts `share` of a retry in, each retry takes one out; `burst` are there from the start.

    So a dead worker's whole batch is served again at once while few are, and a fault that stays cannot multiply the load
    by more than `1 + share`.
    """

    def __init__(self, *, share: float, burst: int) -> None:
        self._share = share
        self._most = burst + share * REMEMBERED_REQUESTS
        self._saved = float(burst)
        self._burst = burst
        self._admitted = 0
        self._taken = 0

    def admitted(self) -> None:
        self._admitted += 1
        self._saved = min(self._most, self._saved + self._share)

    def take(self) -> bool:
        """False, and nothing is taken, when less than one is left."""
        if self._saved + 1e-9 < 1.0:  # ten times 0.1 is a little less than 1
            return False
        self._saved = max(0.0, self._saved - 1.0)
        self._taken += 1
        return True

    def check_invariants(self) -> None:
        assert 0.0 <= self._saved <= self._most
        assert self._taken <= self._burst + self._share * self._admitted + 1e-6


def after_attempts(error: PdserveError, attempts: int, why: str) -> PdserveError:
    """The same error for the client, saying what was tried and why no more is. Only for errors that are retried."""
    message = f"after {attempts} attempt{'s' if attempts > 1 else ''} ({why}): {error.message}"
    if isinstance(error, Overloaded):
        return Overloaded(message, retry_after_s=error.retry_after_s)
    return type(error)(message)
