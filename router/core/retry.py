"""The cluster's budget of retries. Pure."""

from __future__ import annotations

from typing import Final

from pdserve.core.errors import Overloaded, PdserveError

REMEMBERED_REQUESTS: Final = 10_000
"""The bucket keeps the share of at most this many requests, so that a quiet week does not save up for a storm."""


class RetryBucket:
    """A bucket into which each admitted request puts `share` of a retry, and from which each retry takes one. It starts with
    `burst`.

    A fault that stays thus cannot multiply the load by more than `1 + share`. The bucket is for failures of requests: what the
    loss of a worker makes necessary is bounded by the number of losses, and takes nothing out.
    """

    def __init__(self, *, share: float, burst: int) -> None:
        self._share = share
        self._most = burst + share * REMEMBERED_REQUESTS
        self._saved = float(burst)
        self._burst = burst
        self._admitted = 0
        self.taken = 0
        """The retries that were taken out."""

    def admitted(self) -> None:
        """Put in the share of one admitted request."""
        self._admitted += 1
        self._saved = min(self._most, self._saved + self._share)

    @property
    def empty(self) -> bool:
        """Less than one retry is left."""
        return self._saved + 1e-9 < 1.0  # ten times 0.1 is a little less than 1

    def take(self) -> bool:
        """Take one retry out. False: less than one is left, and nothing is taken."""
        if self.empty:
            return False
        self._saved = max(0.0, self._saved - 1.0)
        self.taken += 1
        return True

    def check_invariants(self) -> None:
        """Assert that no more retries were taken than put in."""
        assert 0.0 <= self._saved <= self._most
        assert self.taken <= self._burst + self._share * self._admitted + 1e-6


def after_attempts(error: PdserveError, attempts: int, why: str) -> PdserveError:
    """Return the same error for the client, with the number of attempts and why no more follow. It takes only errors that are
    retried."""
    message = f"after {attempts} attempt{'s' if attempts > 1 else ''} ({why}): {error.message}"
    if isinstance(error, Overloaded):
        return Overloaded(message, retry_after_s=error.retry_after_s)
    return type(error)(message)
