"""The delays before a process that died is started again, and the limit of restarts. Pure: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MOST_DOUBLINGS: Final = 40  # this passes every `longest_s`; a float would overflow after 1023 doublings


@dataclass(slots=True)
class Backoff:
    """The restarts of one process: at most `tries` within any `window_s`. The delay doubles each time, up to `longest_s`.

    Restarts older than the window are forgotten, so a process that dies less often is started again for ever.
    """

    tries: int = 6
    window_s: float = 60.0
    first_s: float = 0.2
    longest_s: float = 5.0
    _starts: list[float] = field(default_factory=list)

    def next_delay_s(self, now_s: float) -> float | None:
        """Return the delay before the next start and count the restart; None when the tries of the window are used up."""
        self._starts = [start for start in self._starts if now_s - start < self.window_s]
        if len(self._starts) >= self.tries:
            return None
        delay = min(self.longest_s, self.first_s * 2.0 ** min(len(self._starts), MOST_DOUBLINGS))
        self._starts.append(now_s)
        return delay

    def take_back(self, start_s: float) -> None:
        """Forget the restart that was counted at this time, if it is not forgotten yet."""
        if start_s in self._starts:
            self._starts.remove(start_s)

    @property
    def used(self) -> int:
        """Number of restarts in the window at the last call of `next_delay_s`."""
        return len(self._starts)
