"""The measured cost of handoffs: the part of their time that a request feels. Pure."""

from __future__ import annotations

import math
from typing import Final

KEEP: Final = 0.98
"""Each new handoff keeps this share of the sums. They forget half of the past in 34 handoffs, as the mean of outputs does."""


class Transfers:
    """Running sums over the handoffs of the decode pool. A handoff weighs by its bytes, so small ones say little."""

    def __init__(self) -> None:
        self._count = 0.0
        self._bytes = 0.0
        self._exposed_s = 0.0

    def saw(self, kv_bytes: int, exposed_s: float) -> None:
        """Count a handoff that was committed. One without bytes, or with a time that is no number, says nothing."""
        if kv_bytes <= 0 or not math.isfinite(exposed_s) or exposed_s < 0:
            return
        self._count = KEEP * self._count + 1
        self._bytes = KEEP * self._bytes + kv_bytes
        self._exposed_s = KEEP * self._exposed_s + exposed_s

    def exposed_s(self, kv_bytes: float) -> float | None:
        """Return the time from the first token until the KV may be used, which the second token waits for. None: no handoff has
        been seen.

        A small handoff is nearly all messages, and of a large one only the last chunk is exposed. So the time is in proportion
        to the bytes up to the mean handoff, and that of the mean handoff above it.
        """
        return None if self._bytes == 0 else self._exposed_s * min(kv_bytes / self._bytes, 1 / self._count)
