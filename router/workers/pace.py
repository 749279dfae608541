"""The pace at which commands pass from the main loop to the links' thread. Pure.

Each passage wakes the thread and makes messages of its own on the links, together 0.1 to 0.2 ms of CPU, whatever it holds.
Below `CALM_PER_S` commands a second each one passes at once. Above it passages are `PACE_S` apart, so that commands of several
requests share their messages. The router then computes for most of the time anyway, so a command waited before as well.
"""

from __future__ import annotations

from typing import Final

CALM_PER_S: Final = 1500.0
"""The commands of about 400 requests a second, which take half of a core or more."""
BURST: Final = 20
"""So many commands beyond that rate pass at once: those of five requests that come together."""
PACE_S: Final = 0.003
"""As much as three requests cost over gRPC. With 20 ms the links' thread took 105 us of a request, with 5 ms 190, with 3 ms 240
and without a pace 300; but each of the two commands before the first token waits."""


class Pace:
    """Counts commands, and tells how long the next passage waits. Times are of one clock that never goes back."""

    def __init__(self) -> None:
        self._calm_s = 0.0
        """The time at which all commands so far have been passed on at the calm rate."""
        self._next_s = 0.0
        """The earliest time of the next passage in a rush."""

    def said(self, now_s: float) -> None:
        """Count a command. A rush is forgotten within `2 * BURST` commands of calm."""
        self._calm_s = min(max(self._calm_s, now_s) + 1 / CALM_PER_S, now_s + 2 * BURST / CALM_PER_S)

    def wait_s(self, now_s: float) -> float:
        """Return the time until the next passage, at most `PACE_S`. 0: now."""
        rushes = self._calm_s - now_s > BURST / CALM_PER_S
        return max(0.0, self._next_s - now_s) if rushes else 0.0

    def passed(self, now_s: float) -> None:
        """Note a passage."""
        self._next_s = now_s + PACE_S
