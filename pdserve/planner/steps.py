"""Decode workers: how the time of a step grows with the sequences in it, and the most sequences that meet the TPOT target.

The line `a + b * sequences` goes through points that were observed, one for each range of sequences. Its slope is the median of
the slopes of all pairs of points (Theil and Sen), so a point that was disturbed counts little. The line is then scaled to
pass through the present point: contexts grow and shrink over the hours, and change all steps alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Final

from pdserve.planner.means import NO_MEAN, Mean
from pdserve.planner.settings import PlannerSettings

FIXED_SEQUENCES: Final = 64.0
"""One point alone is explained by a step whose fixed part takes as long as so many sequences: see
docs/design/0029-predictions.md."""
SPREAD: Final = 1.5
"""Points tell a slope only if the largest one has so many times the sequences of the smallest one."""
TRUST: Final = 2.0
"""A line is believed up to so many times the sequences that were seen."""
TRUST_SEQUENCES: Final = 8.0
"""A line is believed up to so many sequences in any case: an idle pool has seen fewer than one."""
TRUST_BOUND: Final = "a number of sequences that is twice what was seen"
FEWEST_SEQUENCES: Final = 1e-3
SHORTEST_S: Final = 1e-6
"""Means below these tell nothing: the pool ran nothing for nearly the whole time, and no step is so short."""
MAX_POINTS: Final = 40
"""Two ranges for each doubling: enough for a million sequences."""
_SCALE: Final = 2.0
"""The scale that the present point may give the line, or its inverse."""


@dataclass(frozen=True, slots=True)
class StepLine:
    """The time of a step with n sequences: `fixed_s + sequence_s * n`."""

    fixed_s: float
    sequence_s: float

    def step_s(self, sequences: float) -> float:
        """Return the time of a step."""
        return self.fixed_s + self.sequence_s * sequences


@dataclass(frozen=True, slots=True)
class StepPoint:
    """The mean step in one range of sequences."""

    index: int
    seen_s: float
    """The time of the last observation."""
    sequences: Mean = NO_MEAN
    step_s: Mean = NO_MEAN

    @property
    def at(self) -> tuple[float, float]:
        """The sequences and the step time."""
        return self.sequences.value or 0.0, self.step_s.value or 0.0


@dataclass(frozen=True, slots=True)
class Steps:
    """The planner's memory of decode steps: at most `MAX_POINTS` points, and the present one."""

    points: tuple[StepPoint, ...] = ()
    now: StepPoint | None = None

    def add(self, sequences: float, step_s: float, now_s: float, interval_s: float, settings: PlannerSettings) -> Steps:
        """Return the steps with the mean step of an interval that ends at `now_s`."""
        if sequences < FEWEST_SEQUENCES or step_s < SHORTEST_S:
            return self
        index = min(int(2 * math.log2(1 + sequences)), MAX_POINTS - 1)
        kept = [point for point in self.points if point.seen_s >= now_s - settings.step_memory_s]
        old = next((point for point in kept if point.index == index), StepPoint(index, now_s))
        point = _moved(old, sequences, step_s, now_s, interval_s, settings.memory_s)
        others = [each for each in kept if each.index != index]
        now = _moved(self.now or StepPoint(0, now_s), sequences, step_s, now_s, interval_s, settings.smoothing_s)
        return Steps(tuple(sorted([*others, point], key=lambda each: each.index)), now)

    def line(self) -> StepLine | None:
        """Return the line through the points. None: there is none."""
        if self.now is None:
            return None
        sequences, step_s = self.now.at
        line = _theil_sen([point.at for point in self.points])
        if line is None or line.step_s(sequences) <= 0:
            slope = step_s / (FIXED_SEQUENCES + sequences)
            return StepLine(FIXED_SEQUENCES * slope, slope)
        scale = min(max(step_s / line.step_s(sequences), 1 / _SCALE), _SCALE)
        return StepLine(line.fixed_s * scale, line.sequence_s * scale)

    def trusted(self) -> float:
        """Return the most sequences for which the line is believed."""
        return max([TRUST_SEQUENCES, *(TRUST * point.at[0] for point in self.points)])


NO_STEPS: Final = Steps()


def _moved(point: StepPoint, sequences: float, step_s: float, now_s: float, interval_s: float, time_s: float) -> StepPoint:
    """Return the point with an observation."""
    return StepPoint(
        point.index, now_s, point.sequences.add(sequences, interval_s, time_s), point.step_s.add(step_s, interval_s, time_s)
    )


def _theil_sen(points: list[tuple[float, float]]) -> StepLine | None:
    """Return the line with the median slope, at least 0, and a fixed part of at least 0. None: the points are too close."""
    counts = [count for count, _ in points]
    if len(points) < 2 or max(counts) < SPREAD * min(counts):
        return None
    pairs = [(one, other) for at, one in enumerate(points) for other in points[at + 1 :] if other[0] != one[0]]
    slope = max(0.0, median((other[1] - one[1]) / (other[0] - one[0]) for one, other in pairs))
    fixed = median(step_s - slope * count for count, step_s in points)
    if fixed < 0:
        return StepLine(0.0, median(step_s / count for count, step_s in points))
    return StepLine(fixed, slope)


KNEE: Final = 0.05
"""Fewer sequences than this many times `fixed_s / sequence_s` are never planned for a worker. Without any of them a step would
be only a twentieth shorter, so a target that asks for fewer is not reached by more workers."""


@dataclass(frozen=True, slots=True)
class SequenceRoom:
    """The sequences that one decode worker should run, and what bounds them."""

    sequences: float
    step_s: float
    bound: str
    """A phrase for operators, such as "within TPOT 0.05 s"."""

    @property
    def tokens_per_s(self) -> float:
        """The rate of the worker: each sequence gets a token a step."""
        return self.sequences / self.step_s


def room(
    line: StepLine,
    trusted: float,
    tpot_s: float | None,
    max_sequences: float | None,
    kv_per_sequence: float | None,
    settings: PlannerSettings,
    spread: float = 0.0,
) -> SequenceRoom:
    """Return the most sequences whose step meets the target, for which a worker has slots and KV, and that are believed.

    spread: the sequences come and go at random, so they exceed their mean by so many standard deviations (of Poisson's
    distribution) as often as requests may miss the target.
    """
    bounds = [(trusted, TRUST_BOUND)]
    if tpot_s is not None and line.sequence_s > 0:
        most = (tpot_s - line.fixed_s) / line.sequence_s
        allowed = min((settings.tpot_share * tpot_s - line.fixed_s) / line.sequence_s, _mean_below(most, spread))
        knee = KNEE * line.fixed_s / line.sequence_s
        missed = f"TPOT {tpot_s:g} s, which more workers cannot reach"
        bounds.append((allowed, f"TPOT {tpot_s:g} s") if allowed >= knee else (knee, missed))
    if max_sequences is not None:
        bounds.append((settings.sequences_share * max_sequences, f"{max_sequences:g} sequences"))
    if kv_per_sequence:
        bounds.append((settings.kv_share / kv_per_sequence, f"{settings.kv_share:.0%} of its KV blocks"))
    sequences, bound = min(bounds)
    sequences = max(sequences, 1.0)
    return SequenceRoom(sequences, line.step_s(sequences), bound)


def _mean_below(most: float, spread: float) -> float:
    """Return the mean m of which `most` is `spread` standard deviations away: m + spread * sqrt(m) = most."""
    return (math.sqrt(spread**2 / 4 + most) - spread / 2) ** 2 if most > 0 else most
