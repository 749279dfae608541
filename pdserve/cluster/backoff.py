"""How often, and how soon, a process that died is started again. Pure: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

MOST_DOUBLINGS: Final = 40  # far beyond any bound of a wait; a float holds no more than 1023


@dataclass(slots=True)
class Backoff:
    """At most `tries` restarts within any `window_s`; each waits twice as long as the one before, at most `longest_s`.

    A process that dies less often than that is started again for ever: what is older than the window is forgotten.
    """

    tries: int = 6
    window_s: float = 60.0
    first_s: float = 0.2
    longest_s: float = 5.0
    _starts: list[float] = field(default_factory=list)

    def next_delay_s(self, now_s: float) -> float | None:
        """The wait before the next start; None when the tries of the window are used up."""
        self._starts = [start for start in self._starts if now_s - start < self.window_s]
        if len(self._starts) >= self.tries:
            return None
        delay = min(self.longest_s, self.first_s * 2.0 ** min(len(self._starts), MOST_DOUBLINGS))
        self._starts.append(now_s)
        return delay

    @property
    def used(self) -> int:
        """Restarts that the window held when it was last asked."""
        return len(self._starts)
