"""The memory that the bodies of all large requests in progress may take together, or those of all large answers. Owner: one
front end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from pdserve.core.errors import Overloaded, RequestTooLarge

FREE_BYTES: Final = 64 << 10
"""The first bytes of each body are not counted. A connection buffers as many anyway, and small requests get in however many
large ones are in progress."""
RETRY_AFTER_S: Final = 1.0


class BodyBudget:
    """Counts the bytes that large bodies have taken, at most `max_bytes`."""

    def __init__(self, max_bytes: int, what: str = "body", setting: str = "router.max_body_bytes") -> None:
        """`what` and `setting` name the bodies and the limit in errors."""
        self.max_bytes = max_bytes
        self.what = what
        self.setting = setting
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

    @property
    def max_bytes(self) -> int:
        """The bytes that all bodies of the budget may take together."""
        return self._budget.max_bytes

    def grow(self, length: int) -> None:
        """Take bytes for a body that has `length` bytes, or declares them. Raises `Overloaded` when the budget has no room for
        them, and `RequestTooLarge` when it would have none if it were empty."""
        more = max(0, length - FREE_BYTES) - self.taken_bytes
        if more <= 0:
            return
        limit, what, setting = self._budget.max_bytes, self._budget.what, self._budget.setting
        if self.taken_bytes + more > limit:
            raise RequestTooLarge(f"{what}: is over the limit of {limit} bytes for all in progress ({setting})", field=what)
        if self._budget.taken_bytes + more > limit:
            raise Overloaded(
                f"{what}: together with others in progress it would be over the limit of {limit} bytes ({setting})",
                retry_after_s=RETRY_AFTER_S,
            )
        self._budget.taken_bytes += more
        self.taken_bytes += more
