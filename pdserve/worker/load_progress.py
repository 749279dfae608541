"""The progress of a worker's start: the loading thread tells it, and everybody else reads it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

SAY_S: Final = 5.0
"""The seconds between two lines of the log. A start that takes less is not worth a line."""
_GB: Final = 1e9


@dataclass(frozen=True, slots=True)
class LoadState:
    """One moment of a start. `done` and `total` are bytes; `total` is 1 where nobody knows how many there are."""

    what: str
    done: int
    total: int
    bytes_per_s: float

    def __str__(self) -> str:
        if self.total <= 1:
            return self.what
        return f"{self.what}: {self.done / _GB:.2f} of {self.total / _GB:.2f} GB, {self.bytes_per_s / _GB:.2f} GB/s"


class LoadProgress:
    """A `Progress` of the checkpoint that remembers the last moment, and writes one line to the log now and then."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        """`now_s` is a monotonic clock."""
        self._now_s = now_s
        self._began_s = self._said_s = 0.0
        self.state: LoadState | None = None
        """The last moment; None before the first one. Any thread may read it."""

    def __call__(self, what: str, done: int, total: int) -> None:
        now_s = self._now_s()
        if self.state is None or self.state.what != what:
            self._began_s = self._said_s = now_s
        passed_s = now_s - self._began_s
        self.state = LoadState(what, done, total, done / passed_s if passed_s > 0 else 0.0)
        if now_s - self._said_s >= SAY_S:
            self._said_s = now_s
            log.info("%s", self.state)
