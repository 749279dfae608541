"""How often, and how soon, a process that died is started again. Pure: time is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_S = 0.2
LONGEST_S = 5.0


@dataclass(slots=True)
class Backoff:
    """At most `tries` restarts within `window_s`; each waits twice as long as the one before."""

    tries: int = 6
    window_s: float = 60.0
    _starts: list[float] = field(default_factory=list)

    def next_delay_s(self, now_s: float) -> float | None:
        """The wait before the next start; None when the tries of the window are used up."""
        self._starts = [start for start in self._starts if now_s - start < self.window_s]
        if len(self._starts) >= self.tries:
            return None
        delay = min(LONGEST_S, FIRST_S * 2.0 ** len(self._starts))
        self._starts.append(now_s)
        return delay
