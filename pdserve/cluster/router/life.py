"""The life of a cluster's router as its supervisor sees it: it starts, serves, ends or falls silent, and is started again.

Pure: each look of the supervisor is an event, and time comes with it. A router is started again for as long as the cluster
lives, however often it ends, since the workers go on without it and no failure of a router is mended by ending them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from pdserve.cluster.backoff import Backoff

START_LIMIT_S: Final = 300.0  # a start may convert or download a model


class RouterPhase(Enum):
    """The phases of the router."""

    STARTING = "starting"
    SERVING = "serving"
    AWAY = "away"  # its process has ended, or was killed; the next start comes after a delay


class Sight(Enum):
    """The sight that a look at the router's process gives."""

    STARTS = "starts"  # it runs and is not ready
    SERVES = "serves"
    SILENT = "silent"  # it runs and answers nobody
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class RouterSeen:
    """One look. `detail` says how the process ended, and is empty otherwise."""

    sight: Sight
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process, which does not answer."""


@dataclass(frozen=True, slots=True)
class RouterStart:
    """Start a process at the same addresses."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The router is gone, and is started again after `delay_s`."""

    detail: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class Back:
    """The router serves again."""


Effect = Kill | RouterStart | Lost | Back


@dataclass(slots=True)
class RouterLife:
    """The machine. Call `look` with what was seen, often: it starts nothing earlier than at the first look after a delay."""

    phase: RouterPhase = RouterPhase.SERVING
    backoff: Backoff = field(default_factory=Backoff)
    since_s: float = 0.0  # the time of the last start
    again_s: float = 0.0  # while it is away: the time of the next start
    limited: bool = False  # it has ended so often since it last served that every further start waits longest
    told: tuple[str, bool] = ("", False)  # what was told of the last loss, unless the router has served since

    def look(self, seen: RouterSeen, now_s: float) -> list[Effect]:
        """Take one look, and return what is to be done, in order."""
        return _TABLE[self.phase, seen.sight](self, seen, now_s)

    def _nothing(self, seen: RouterSeen, now_s: float) -> list[Effect]:
        return []

    def _came_up(self, seen: RouterSeen, now_s: float) -> list[Effect]:
        self.phase, self.limited, self.told = RouterPhase.SERVING, False, ("", False)
        return [Back()]

    def _still_starts(self, seen: RouterSeen, now_s: float) -> list[Effect]:
        if now_s - self.since_s <= START_LIMIT_S:
            return []
        return [Kill(), *self._went(f"it was not ready after {START_LIMIT_S:.0f} s", now_s)]

    def _fell_silent(self, seen: RouterSeen, now_s: float) -> list[Effect]:
        return [Kill(), *self._went("it did not answer, and was killed", now_s)]

    def _ended(self, seen: RouterSeen, now_s: float) -> list[Effect]:
        return self._went(seen.detail, now_s)

    def _went(self, detail: str, now_s: float) -> list[Effect]:
        """Plan the next start. A loss that repeats the loss before is not reported again, or a taken port would fill the
        screen."""
        next_s = self.backoff.next_delay_s(now_s)
        self.limited |= next_s is None
        delay_s = self.backoff.longest_s if next_s is None else next_s
        self.phase, self.again_s = RouterPhase.AWAY, now_s + delay_s
        repeated, self.told = self.told == (detail, self.limited), (detail, self.limited)
        often = f"; it has ended {self.backoff.tries} times within {self.backoff.window_s:.0f} s, and is tried for ever"
        return [] if repeated else [Lost(detail + often if self.limited else detail, delay_s)]

    def _wait(self, seen: RouterSeen, now_s: float) -> list[Effect]:
        if now_s < self.again_s:
            return []
        self.phase, self.since_s = RouterPhase.STARTING, now_s
        return [RouterStart()]

    def _not_yet_gone(self, seen: RouterSeen, now_s: float) -> list[Effect]:
        return [Kill()]  # a process that waits for a disk ends later than it was killed


_TABLE: Final[dict[tuple[RouterPhase, Sight], Callable[[RouterLife, RouterSeen, float], list[Effect]]]] = {
    (RouterPhase.STARTING, Sight.STARTS): RouterLife._still_starts,
    (RouterPhase.STARTING, Sight.SERVES): RouterLife._came_up,
    (RouterPhase.STARTING, Sight.SILENT): RouterLife._fell_silent,
    (RouterPhase.STARTING, Sight.ENDED): RouterLife._ended,
    (RouterPhase.SERVING, Sight.STARTS): RouterLife._nothing,
    (RouterPhase.SERVING, Sight.SERVES): RouterLife._nothing,
    (RouterPhase.SERVING, Sight.SILENT): RouterLife._fell_silent,
    (RouterPhase.SERVING, Sight.ENDED): RouterLife._ended,
    (RouterPhase.AWAY, Sight.STARTS): RouterLife._not_yet_gone,
    (RouterPhase.AWAY, Sight.SERVES): RouterLife._not_yet_gone,
    (RouterPhase.AWAY, Sight.SILENT): RouterLife._not_yet_gone,
    (RouterPhase.AWAY, Sight.ENDED): RouterLife._wait,
}


PROBE_S: Final = 1.0  # a healthy router is asked this often; an answer costs it microseconds
ASK_CLIENTS_S: Final = 2.0  # the wait for an answer on the port of clients; a loop that is so late serves nobody well
ASK_ADMIN_S: Final = 1.0  # and then on the port of administration, which has other limits of connections
MOST_SILENT: Final = 3
"""Unanswered probes in a row that end a router. With the pause before the first one, that is within 10 s."""


@dataclass(slots=True)
class RouterSilence:
    """The unanswered probes in a row. Only probes that were really waited for count, so a machine or a supervisor that itself
    stood still for a while accuses nobody."""

    limit_s: float = 2 * (ASK_CLIENTS_S + ASK_ADMIN_S)
    count: int = 0

    def note(self, *, answered: bool, took_s: float) -> None:
        """Count one probe. took_s: the time from asking until the answer, or until the wait for it ended."""
        if answered:
            self.count = 0
        elif took_s <= self.limit_s:
            self.count += 1

    @property
    def lasts(self) -> bool:
        """Tell whether the router counts as one that hangs."""
        return self.count >= MOST_SILENT
