"""Virtual time: callbacks in the order of their times, and in the order of their requests where times are equal. Nothing
sleeps."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """A heap of callbacks. `now_s` is the time of the callback that runs."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.callbacks = 0
        """The number of callbacks that have run."""
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback(*args)` at a time, which must not have passed."""
        assert time_s >= self.now_s, "time does not run backwards"
        self._asked += 1
        heapq.heappush(self._heap, (time_s, self._asked, callback, args))

    def after(self, delay_s: float, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback(*args)` once `delay_s` has passed."""
        self.at(self.now_s + delay_s, callback, *args)

    def step(self) -> bool:
        """Run the next callback. Return False when there is none."""
        if not self._heap:
            return False
        self.now_s, _, callback, args = heapq.heappop(self._heap)
        self.callbacks += 1
        callback(*args)
        return True
