"""The test of one rate: it says, while a run goes on, whether enough requests meet their targets. Pure.

Requests are judged in the order in which they were planned, never in the order of their ends, which would favour short ones. A
request that could meet its targets has ended when `due_s` has passed, so each request is known by then: a slow one is a miss.

Neighbours share a queue, so they are not independent. At each look, all known requests are cut into 16 batches of equal size,
and the spread of the batches gives the effective number of requests of a Wilson interval. The same boundary holds at each of
the few looks (Pocock 1977), so that to look often does not make a wrong decision more likely. `docs/design/0045-search.md` has
the measured rates of errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

import numpy as np

from pdserve_bench.layout import Slo
from pdserve_bench.row import BenchRow
from pdserve_bench.workload.request import BenchRequest

BATCHES: Final = 16
MAX_LOOKS: Final = 12
BOUNDARY: Final = 2.96
"""Pocock's boundary for twelve looks and an error of 5 % is 2.585 standard errors. Student's t with 15 degrees of freedom
exceeds 2.96 as often as a normal variable exceeds that."""
FIRST_LOOK: Final = 2 * BATCHES
"""The fewest requests that are judged."""
GROWTH: Final = 4.0
"""A backlog grows without bound when it grew by more than so many standard deviations of the number of arrivals."""


class Decision(Enum):
    """The end of a test."""

    YES = "yes"
    NO = "no"
    OVERLOADED = "overloaded"
    """No, because the backlog grows without bound."""


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """The limits of one test."""

    target: float
    """The share of the requests that should meet their targets."""
    rate_per_s: float
    warm_s: float
    """Requests that were planned before this time only fill the cluster. No figure counts them."""
    min_yes_s: float
    """The least time after `warm_s` until the answer may be yes. A rate that is a little too high looks good for as long as its
    queue is short."""
    max_s: float
    """The longest run, with `warm_s`."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The attainment that a run has shown so far, with its interval."""

    requests: int = 0
    attained: int = 0
    low: float = 0.0
    high: float = 1.0


def wilson(share: float, count: float, z: float) -> tuple[float, float]:
    """Return the Wilson interval of a share that was seen in `count` effective trials."""
    if count <= 0.0:
        return 0.0, 1.0
    spread = z * math.sqrt(share * (1.0 - share) / count + z * z / (4.0 * count * count))
    middle = share + z * z / (2.0 * count)
    scale = 1.0 + z * z / count
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def effective_count(good: Sequence[bool]) -> float:
    """Return the number of independent requests that say as much as these, which follow each other.

    It is never more than their number. Batches that resemble their neighbours are too short, and lower it further.
    """
    count = len(good)
    share = sum(good) / count
    size = count // BATCHES
    means = np.asarray(good[count - size * BATCHES :], dtype=float).reshape(BATCHES, size).mean(axis=1)
    variance = float(means.var(ddof=1))
    if variance == 0.0 or share in (0.0, 1.0):
        return float(count)
    off = means - means.mean()
    alike = min(0.8, max(0.0, float((off[1:] * off[:-1]).sum() / (off * off).sum())))
    variance *= (1.0 + alike) / (1.0 - alike)
    return min(float(count), share * (1.0 - share) * BATCHES / variance)


class Trial:
    """One run of one rate. The times are seconds since its start, and never run backwards."""

    def __init__(self, settings: TrialSettings) -> None:
        """Begin a test."""
        self.settings = settings
        self.decision: Decision | None = None
        """The decision. It stays once it was made."""
        self.estimate = Estimate()
        self._due_s: list[float] = []
        self._planned_s: list[float] = []
        self._state: list[bool | None] = []
        self._ended_s: list[float] = []
        self._stays_s: list[float] = []
        self._known = 0
        self._good: list[bool] = []
        self._looks = 0
        measured_s = max(0.0, settings.max_s - settings.warm_s)
        self._next_look = max(FIRST_LOOK, round(settings.rate_per_s * measured_s / 2 ** ((MAX_LOOKS - 1) / 2)))

    def plan(self, planned_s: float, due_s: float = math.inf) -> int:
        """Note a request, and return its number. `due_s` is the time by which it ends if it meets its targets."""
        self._planned_s.append(planned_s)
        self._due_s.append(due_s)
        self._state.append(None)
        return len(self._state) - 1

    def end(self, number: int, now_s: float, good: bool) -> Decision | None:
        """Note the end of a request, and return the decision if there is one."""
        if self._state[number] is None:
            self._state[number] = good
            self._ended_s.append(now_s)
            self._stays_s.append(now_s - self._planned_s[number])
        self._settle(now_s)
        if self.decision is None and self._looks < MAX_LOOKS - 1 and len(self._good) >= self._next_look:
            self._next_look = max(self._next_look + 1, math.ceil(len(self._good) * math.sqrt(2.0)))
            self._look(now_s)
        return self.decision

    def close(self, now_s: float) -> Estimate:
        """End the run with a last look, and return what it showed. Requests that are not known by then do not count.

        A rate a little too high fills its queue for most of a run: the first requests are good and the last ones are not, so
        that all together decide nothing. Then the second half is judged alone, and only a no counts.
        """
        self._settle(now_s)
        if self.decision is None:
            self._look(now_s)
        if self.decision is None and len(self._later) >= FIRST_LOOK:
            later = self._judged(self._later)
            if later.high < self.settings.target:
                self.decision, self.estimate = Decision.NO, later
        return self.estimate

    @property
    def in_flight(self) -> int:
        """The requests that were noted and have not ended."""
        return len(self._state) - len(self._ended_s)

    def _settle(self, now_s: float) -> None:
        """Judge the requests that are known, in order."""
        while self._known < len(self._state):
            good = self._state[self._known]
            if good is None and self._due_s[self._known] >= now_s:
                return
            if self._planned_s[self._known] >= self.settings.warm_s:
                self._good.append(bool(good))
            self._known += 1

    def _look(self, now_s: float) -> None:
        self._looks += 1
        good, target = self._good, self.settings.target
        count, attained = len(good), sum(good)
        if self._backlog_grows(now_s):
            self.decision = Decision.OVERLOADED
        if count < FIRST_LOOK:
            low, high = wilson(attained / count if count else 0.0, count, BOUNDARY)
            self.estimate = Estimate(count, attained, min(low, target), max(high, target))
            return
        seen = self._judged(good)
        if seen.low > target:
            # A yes needs a run that was long enough, and a second half that is good enough alone.
            later, is_long = self._later, now_s - self.settings.warm_s >= self.settings.min_yes_s
            if not is_long or sum(later) < target * len(later):
                seen = replace(seen, low=target)
        self.estimate = seen
        if self.decision is None:
            self.decision = Decision.YES if seen.low > target else Decision.NO if seen.high < target else None

    @property
    def _later(self) -> list[bool]:
        """The second half of the requests that are known."""
        return self._good[len(self._good) // 2 :]

    @staticmethod
    def _judged(good: Sequence[bool]) -> Estimate:
        low, high = wilson(sum(good) / len(good), effective_count(good), BOUNDARY)
        return Estimate(len(good), sum(good), low, high)

    def _backlog_grows(self, now_s: float) -> bool:
        """Tell whether more requests are in flight than half of the run ago, by more than arrivals vary by chance."""
        since_s = max(self.settings.warm_s, now_s / 2)
        planned_s, ended_s = np.asarray(self._planned_s), np.asarray(self._ended_s)
        arrived_s = planned_s[(planned_s > since_s) & (planned_s <= now_s)]
        count = len(arrived_s)
        if count < FIRST_LOOK or not self._stays_s or float(np.median(self._stays_s)) > since_s:
            return False
        growth = count - int((ended_s > since_s).sum())
        bins = np.histogram(arrived_s, bins=BATCHES, range=(since_s, now_s))[0]
        dispersion = max(1.0, float(bins.var(ddof=1) / bins.mean()))
        return growth > GROWTH * math.sqrt(dispersion * count)


# The test of a rate as the load generator sees it: an iterator around the workload, and a watch of the rows. Pure.


SLACK_S: Final = 0.05
"""The time by which a request may end later than its targets say: the generator sends a little late, and messages travel."""


class Judge:
    """It tells a trial of each request and of its end. It ends the run when the trial has decided."""

    def __init__(self, trial: Trial, slo: Slo) -> None:
        """Judge requests by the targets."""
        self.trial = trial
        self._slo = slo
        self._numbers: dict[int, int] = {}

    def requests(self, requests: Iterator[BenchRequest]) -> Iterator[BenchRequest]:
        """Yield the requests, and note those whose times are known. Later turns of a session are noted when they end."""
        for request in requests:
            if request.send_at_s is not None and not request.after and request.send_at_s < self.trial.settings.max_s:
                due_s = request.send_at_s + self._longest_s(request.max_tokens)
                self._numbers[request.number] = self.trial.plan(request.send_at_s, due_s)
            yield request

    def watch(self, row: BenchRow) -> bool:
        """Take a row. Return True when the run is decided. Rows that the end of the run cut off tell nothing."""
        if row.cut:
            return True
        number = self._numbers.pop(row.number, None)
        if number is None:
            number = self.trial.plan(row.planned_s)
        good = row.ok and self._slo.met(row.ttft_s, row.tpot_s)
        return self.trial.end(number, row.ended_s, good) is not None

    def _longest_s(self, max_tokens: int) -> float:
        """Return the longest stay of a request that meets its targets. Infinite: one of the targets is missing."""
        if self._slo.ttft_s is None or self._slo.tpot_s is None:
            return math.inf
        return self._slo.ttft_s + self._slo.tpot_s * max(0, max_tokens - 1) + SLACK_S
