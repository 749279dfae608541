"""The memory that the bodies of all large requests in progress may take together. Owner: one front end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pdserve.core.errors import Overloaded

FREE_BYTES: Final = 64 << 10
"""The first bytes of each body are not counted. A connection buffers as many anyway, and small requests get in however many
large ones are in progress."""
RETRY_AFTER_S: Final = 1.0


class BodyBudget:
    """Counts the bytes that large bodies have taken, at most `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.taken_bytes = 0

    @contextmanager
    def share(self) -> Iterator[BodyShare]:
        """Open the share of one body. It is returned when nothing needs the body any more."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            self.taken_bytes -= share.taken_bytes


class BodyShare:
    """The bytes that one body has taken from the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.taken_bytes = 0

    def grow(self, length: int) -> None:
        """Take bytes for a body that has `length` bytes, or declares them. Raises `Overloaded` when the budget has no room for
        them."""
        more = max(0, length - FREE_BYTES) - self.taken_bytes
        if more <= 0:
            return
        limit = self._budget.max_bytes
        if self._budget.taken_bytes + more > limit:
            raise Overloaded(
                f"body: large bodies in progress reach the limit of {limit} bytes (router.max_inflight_body_bytes)",
                retry_after_s=RETRY_AFTER_S,
            )
        self._budget.taken_bytes += more
        self.taken_bytes += more
