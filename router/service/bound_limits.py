"""Limits that bind: each is counted, and the log says once a minute which ones bind and what would raise them."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Final

logger = logging.getLogger(__name__)

WARN_S: Final = 60.0
ADVICE: Final = {
    "connections": "raise `ulimit -n` or router.max_connections",
    "queue": "add decode workers, or raise router.max_queued_requests if it is set",
    "prefix_index": "raise router.prefix_index_bytes, if the machine has the memory",
}
_WHAT: Final = {
    "connections": "connections of clients were refused",
    "queue": "requests were refused or shed because the queue was full",
    "prefix_index": "blocks were forgotten by the index of held prefixes",
}


class BoundLimits:
    """Counts what limits have refused since the start. The router's loop owns it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._warned: Counter[str] = Counter()
        self._warned_s: dict[str, float] = {}

    def note(self, limit: str, count: int = 1) -> None:
        """Count what a limit has refused: "connections", "queue" or "prefix_index"."""
        self.counts[limit] += count

    def warn(self, now_s: float) -> None:
        """Log the limits that have bound since their last warning, each at most once in `WARN_S`."""
        for limit, count in self.counts.items():
            new = count - self._warned[limit]
            if new and now_s - self._warned_s.get(limit, -WARN_S) >= WARN_S:
                self._warned[limit], self._warned_s[limit] = count, now_s
                logger.warning("%d %s: %s", new, _WHAT[limit], ADVICE[limit])
