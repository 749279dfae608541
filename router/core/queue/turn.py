"""The turn of a waiting request: what it is compared by. Pure.

A turn is a snapshot. It is taken when a request is looked at, because the start tags in it rise while others are served.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple


class Line(NamedTuple):
    """The requests that are served by fair queueing among each other. Lines are ordered by time."""

    slo_class: str
    priority: int
    replay: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """The place of one waiting request before or behind others. Requests of one line are ordered by `tags`, those of different
    lines by `time_s`."""

    time_s: float
    """The time when the first token should leave, counted from when the client's fair turn came, less what its priority is
    worth."""
    own_s: float
    """The same, counted from the request's arrival. It orders the requests of one call."""
    arrival: int
    """The number of its arrival, which orders equal times."""
    line: Line | None = None
    tags: tuple[float, ...] = ()
    """The start tag of its flow at each level, and when that flow was last served."""

    def __lt__(self, other: Turn) -> bool:
        if self.line is not None and self.line == other.line:
            return (self.tags, self.own_s, self.arrival) < (other.tags, other.own_s, other.arrival)
        return (self.time_s, self.arrival) < (other.time_s, other.arrival)

    def __le__(self, other: Turn) -> bool:
        return not other < self


FIRST: Final = Turn(-math.inf, -math.inf, 0)
"""The turn that comes before all others."""
