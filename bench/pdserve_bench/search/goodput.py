"""The search for goodput over rates and layouts: from the points so far to the next thing to do. Pure.

Its whole state is the list of points, so a search goes on from its file as if nothing had happened.
`docs/design/0045-search.md` says why these points, and what was rejected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, TypeAlias

from pdserve_bench.layout import Layout
from pdserve_bench.search.result import LayoutResult, Point
from pdserve_bench.search.settings import SearchSettings

MAX_REFUSED: Final = 3
"""A rate that the generator could not keep up with so many times is out of its reach."""
_COARSE: Final = 0.25
"""The resolution of points that only bracket the goodput."""
_RACE_STEP: Final = 1.1
"""The first step of a layout whose goodput is known roughly, from another one."""
_SHARES: Final = 2
"""One family may use so many equal shares of the budget while another one is open, where there is one share more than there are
families: on a machine that changes, the baseline alone used all 25 minutes."""


class GoodputSearch:
    """The decisions of one search."""

    def __init__(self, settings: SearchSettings) -> None:
        """Prepare a search."""
        self.settings = settings

    def next(
        self,
        points: Sequence[Point],
        remaining_s: float = math.inf,
        reshape_s: float = 0.0,
        shaped: Layout | None = None,
    ) -> Action:
        """Return what to do next.

        `remaining_s` is what is left of the budget, `reshape_s` what a change of the layout costs, and `shaped` the layout that
        the cluster has. None: it is unknown.
        """
        groups = families(self.settings, points)
        action = self._wanted(self._in_turn(groups, points, remaining_s), points)
        if isinstance(action, StopAction):
            return action
        left_s = remaining_s - (reshape_s if action.layout != shaped else 0.0)
        settled = all(group.points and group.settled(group.leader) for group in groups)
        needed_s = self._least_s(settled)
        if left_s < needed_s:
            return StopAction(
                False,
                f"the budget is used up: {max(0.0, remaining_s):.0f} s are left, and one more point needs {needed_s:.0f} s",
            )
        return replace(action, max_s=min(self.settings.max_point_s, left_s))

    def results(self, points: Sequence[Point]) -> tuple[LayoutResult, ...]:
        """Return the goodput of each layout that was measured, the best one first."""
        found = []
        for group in families(self.settings, points):
            for layout in group.points:
                curve = group.curve(layout)
                leads = layout == group.leader
                closed = not leads and group.settled(group.leader) and group.open_rate(layout) is None
                narrow = curve.settled(self.settings.reachable_tolerance, self.settings.floor_per_s)
                done = (narrow and group.settled(layout)) or closed
                goodput = curve.goodput_per_s()
                found.append(LayoutResult(layout, goodput, curve.low_per_s, curve.high_per_s, done))
        return tuple(sorted(found, key=lambda one: (-one.goodput_per_s, one.layout.max_num_seqs)))

    def knees(self, points: Sequence[Point]) -> dict[str, int]:
        """Return the smallest `max_num_seqs` that does not cost goodput, by the name of the best split of each family.

        A family that keeps the target at no rate has none.
        """
        groups = families(self.settings, points)
        return {group.leader.name: group.knee for group in groups if group.curve(group.leader).low_per_s}

    def _least_s(self, settled: bool) -> float:
        """Return the time without which no point is begun. A race may find a new leader, which must be settled as well."""
        settings = self.settings
        one_s = min(settings.max_point_s, settings.warm_s + 5.0)
        return one_s + (settings.max_point_s if settled else 0.0)

    @staticmethod
    def _in_turn(groups: Sequence[TestFamily], points: Sequence[Point], remaining_s: float) -> list[TestFamily]:
        """Return the families, those last that have used their share of the budget."""
        share_s = (sum(point.measured_s for point in points) + remaining_s) * _SHARES / (len(groups) + 1)

        def used_up(group: TestFamily) -> bool:
            of_group = (point.measured_s for point in points if group.has(point.layout))
            return sum(of_group) >= share_s

        return sorted(groups, key=used_up)

    def _wanted(self, groups: Sequence[TestFamily], points: Sequence[Point]) -> RunAction | StopAction:
        """Return the next point, were there no end of time."""
        for group in groups:
            run = self._settle(group, group.leader, groups, points)
            if run is not None:
                return run
        for group in reversed(groups):
            for challenger in group.challengers():
                rate = group.open_rate(challenger)
                if rate is None or self._cap(points, challenger) <= rate < math.inf:
                    continue
                if math.isfinite(rate):
                    return self._run(challenger, rate)
                run = self._settle(group, challenger, groups, points)
                if run is not None:
                    return run
        caps = [self._cap(points, group.leader) for group in groups if not group.settled(group.leader)]
        if caps and min(caps) == math.inf:
            return StopAction(
                False,
                f"runs of {self.settings.max_point_s:.0f} s are too short to decide rates below "
                f"{self.settings.decidable_per_s:.3g} requests a second: give a larger --max-point-s or --budget-minutes",
            )
        if caps:
            return StopAction(
                False,
                f"the generator cannot send {min(caps):.3g} requests a second, which the cluster may serve: "
                "run it on a machine, or on cores, that the workers do not use",
            )
        return StopAction(True, "every layout is settled, or can no longer be the best one")

    def _settle(
        self, group: TestFamily, layout: Layout, groups: Sequence[TestFamily], points: Sequence[Point]
    ) -> RunAction | None:
        """Return the next point that settles a layout. None: it is settled, or the generator can offer no more."""
        if group.settled(layout) and group.points:
            return None
        settings, curve, cap = self.settings, group.curve(layout), self._cap(points, layout)
        if curve.settled(settings.reachable_tolerance, settings.floor_per_s):
            return self._run(layout, curve.low_per_s)
        known = max((other.curve(other.leader).low_per_s for other in groups if other is not group), default=0.0)
        known = known or (group.curve(group.leader).low_per_s if layout != group.leader else 0.0)
        rate = next_rate(curve, known or settings.first_rate_per_s, _RACE_STEP if known else 2.0, settings, cap)
        too_low = curve.low_per_s == 0.0 and bool(curve.rates) and rate < settings.decidable_per_s
        if rate >= cap or too_low or (rate in curve.rates and curve.low_per_s == 0.0):
            return None
        return self._run(layout, rate, coarse=not curve.bracketed())

    def _run(self, layout: Layout, rate_per_s: float, *, coarse: bool = False) -> RunAction:
        """Return a run of one rate. A coarse one only brackets: the low end is measured again before it counts."""
        settings = self.settings
        resolution = _COARSE if coarse else settings.tolerance
        return RunAction(layout, rate_per_s, settings.min_yes_s(resolution), settings.max_point_s)

    @staticmethod
    def _cap(points: Sequence[Point], layout: Layout) -> float:
        """Return the lowest rate that the generator could not offer. Infinite: it kept up with all of them."""
        refused = [point.rate_per_s for point in points if point.refused and point.layout == layout]
        return min((rate for rate in refused if refused.count(rate) >= MAX_REFUSED), default=math.inf)


# The next step of a search, as data. Pure.


@dataclass(frozen=True, slots=True)
class RunAction:
    """Shape the cluster, where it has another layout, and run one rate until it is decided."""

    layout: Layout
    rate_per_s: float
    min_yes_s: float
    """The least time after the cluster is warm until the answer may be yes."""
    max_s: float
    """The longest run. It may end earlier, and does when its test decides."""


@dataclass(frozen=True, slots=True)
class StopAction:
    """The search is over."""

    complete: bool
    reason: str
    """The reason, as a sentence for the operator."""


Action: TypeAlias = RunAction | StopAction


# The attainment of one layout against the rate, as its points show it. Pure.


_SAME = 1.0 + 1e-9
"""Two rates are the same one when they differ by less than this factor."""


def says_yes(point: Point, target: float) -> bool:
    """Tell whether a point decided that its rate keeps the target."""
    return not point.overloaded and point.low > target


def says_no(point: Point, target: float) -> bool:
    """Tell whether a point decided that its rate misses the target."""
    return point.overloaded or point.high < target


@dataclass(frozen=True, slots=True)
class Curve:
    """The rates of one layout, and what is known of them. More load is never better."""

    target: float
    rates: tuple[float, ...] = ()
    """The rates that were measured, in order. Each occurs once."""
    low_per_s: float = 0.0
    """The highest rate that keeps the target. 0: none did."""
    high_per_s: float = math.inf
    """The lowest rate that misses it. Infinite: none did."""
    yes: tuple[float, ...] = ()
    no: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    """The attainment at each rate."""
    weights: tuple[float, ...] = ()
    """The requests at each rate."""
    points: int = 0

    def confirmed(self, points: Iterable[Point]) -> bool:
        """Tell whether `low_per_s` was measured twice."""
        return sum(point.rate_per_s == self.low_per_s for point in points) > 1

    def widest_gap(self, tolerance: float) -> tuple[float, float, float]:
        """Return the neighbours within the interval that are farthest from each other, and their distance in tolerances.

        Next to a rate that could not be decided, points say little, so a gap may be twice as wide there.
        """
        inside = [rate for rate in self.rates if self.low_per_s <= rate <= self.high_per_s]
        known = {self.low_per_s, self.high_per_s}
        gaps = [
            (lower, higher, math.log(higher / lower) / math.log1p(tolerance) / (1.0 if {lower, higher} <= known else 2.0))
            for lower, higher in pairwise(inside)
        ]
        return max(gaps, key=lambda gap: gap[2])

    def bracketed(self) -> bool:
        """Tell whether both ends of the interval are known."""
        return self.low_per_s > 0.0 and math.isfinite(self.high_per_s)

    def settled(self, tolerance: float, floor_per_s: float) -> bool:
        """Tell whether the interval is as narrow as is asked for. An undecided rate within it widens it, and is a neighbour."""
        if self.high_per_s <= floor_per_s * _SAME:
            return True
        if not self.bracketed():
            return False
        return self.widest_gap(tolerance)[2] <= 1.0 + 1e-9

    def missed_at(self, rate_per_s: float) -> bool:
        """Tell whether this rate, or a lower one, misses the target."""
        return self.high_per_s <= rate_per_s * _SAME

    def goodput_per_s(self) -> float:
        """Return the rate at which the attainment falls to the target, within the interval.

        The attainments are made to fall (pool adjacent violators), and what lies between two rates is a line over the
        logarithm of the rate.
        """
        if not self.bracketed():
            return self.low_per_s
        falling = falling_fit(self.shares, self.weights)
        rate = self.low_per_s
        for (left, right), (above, below) in zip(pairwise(self.rates), pairwise(falling), strict=True):
            if above >= self.target > below:
                part = (above - self.target) / (above - below)
                rate = left * (right / left) ** part
        return min(max(rate, self.low_per_s), self.high_per_s)


def curve_of(points: Sequence[Point], target: float) -> Curve:
    """Return the curve of the points of one layout.

    A rate keeps the target when all of its points say so, and misses it when one of them does.
    """
    by_rate: dict[float, list[Point]] = {}
    for point in points:
        by_rate.setdefault(point.rate_per_s, []).append(point)
    rates = tuple(sorted(by_rate))
    no = tuple(rate for rate in rates if any(says_no(point, target) for point in by_rate[rate]))
    yes = tuple(rate for rate in rates if all(says_yes(point, target) for point in by_rate[rate]))
    low = max((rate for rate in yes if not no or rate < min(no)), default=0.0)
    high = min((rate for rate in no if not yes or rate > max(yes)), default=math.inf)
    counts = [sum(point.requests for point in by_rate[rate]) for rate in rates]
    met = [sum(0 if point.overloaded else point.attained for point in by_rate[rate]) for rate in rates]
    shares = tuple(good / count if count else 0.0 for good, count in zip(met, counts, strict=True))
    return Curve(target, rates, low, high, yes, no, shares, tuple(max(1.0, count) for count in counts), len(points))


def falling_fit(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Return the values that never rise and are nearest to these, by weighted squares."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] < block[0]:
            mean, mass, count = blocks.pop()
            total = mass + block[1]
            block = ((mean * mass + block[0] * block[1]) / total, total, count + block[2])
        blocks.append(block)
    return [value for value, _, count in blocks for _ in range(count)]


def next_rate(curve: Curve, first_per_s: float, step: float, settings: SearchSettings, cap_per_s: float = math.inf) -> float:
    """Return the rate that says most about the goodput: the first one, then steps out of what is known, then the middle.

    `step` is the factor of the first step upwards. The next ones are larger, up to 2. The generator cannot send `cap_per_s`; it
    is returned when nothing below it is left to measure.
    """
    floor_per_s, tolerance = settings.floor_per_s, settings.reachable_tolerance
    if not curve.rates:
        return max(floor_per_s, first_per_s if first_per_s < cap_per_s else cap_per_s / 2)
    if not math.isfinite(curve.high_per_s):
        top = max(curve.rates)
        higher = top * min(2.0, step ** len(curve.rates))
        if higher < cap_per_s:
            return higher
        return math.sqrt(top * cap_per_s) if cap_per_s > top * (1.0 + tolerance) else cap_per_s
    if curve.low_per_s == 0.0:
        below = curve.rates[0]
        return max(floor_per_s, below / 2 if below in curve.no else below / min(2.0, step * step))
    lower, higher, _ = curve.widest_gap(tolerance)
    return math.sqrt(lower * higher)


# The layouts of one family: colocated or disaggregated, of one pair of degrees. Which of them race against its leader. Pure.


_ROOM = 1.25
"""A batch is limited to the sequences that it has at the goodput, and a quarter more for chance."""


@dataclass(frozen=True, slots=True)
class TestFamily:
    """The layouts with a prefill pool, or those without one, of one pair of degrees."""

    settings: SearchSettings
    degrees: tuple[int, int]
    prefills: tuple[int, ...]
    """The splits of the family, the most promising first."""
    points: dict[Layout, list[Point]]
    """The points that count, by layout, in the order of the first point of each."""

    def curve(self, layout: Layout) -> Curve:
        """Return what is known of a layout."""
        return curve_of(self.points.get(layout, ()), self.settings.attainment)

    def has(self, layout: Layout) -> bool:
        """Tell whether a layout is of the family."""
        return layout.disaggregated is (self.prefills[0] > 0) and layout.degrees == self.degrees

    @property
    def leader(self) -> Layout:
        """The best layout so far: it keeps the highest rate. Of equal ones, it is the one that was measured first."""
        layouts = [*self.points] or [self.settings.base(self.prefills[0], self.degrees)]
        return max(layouts, key=lambda one: self.curve(one).low_per_s)

    @property
    def knee(self) -> int:
        """The smallest `max_num_seqs` with which the leader's layout keeps a rate that the leader keeps."""
        leader, low_per_s = self.leader, self.curve(self.leader).low_per_s
        alike = [one for one in self.points if replace(one, max_num_seqs=leader.max_num_seqs) == leader]
        return min((one.max_num_seqs for one in alike if self.curve(one).low_per_s >= low_per_s), default=leader.max_num_seqs)

    def settled(self, layout: Layout) -> bool:
        """Tell whether the goodput of a layout is known as exactly as is asked for, and was measured twice at its low end."""
        settings, points = self.settings, self.points.get(layout, [])
        curve = self.curve(layout)
        if curve.points >= settings.max_points:
            return True
        if not curve.settled(settings.reachable_tolerance, settings.floor_per_s):
            return False
        return curve.low_per_s == 0.0 or curve.confirmed(points)

    def challengers(self) -> Iterator[Layout]:
        """Yield the layouts that might be better than the leader: other splits, then other chunks, then smaller batches."""
        leader, settings = self.leader, self.settings
        for prefill in self.prefills:
            near = abs(prefill - leader.prefill) * self.degrees[0] <= math.lcm(*self.degrees)
            if prefill != leader.prefill and (near or not any(one.prefill == prefill for one in self.points)):
                yield replace(leader, prefill=prefill, decode=settings.base(prefill, self.degrees).decode)
        chunks = sorted(settings.chunks)
        at = chunks.index(leader.chunk_tokens)
        for chunk in [*chunks[at + 1 : at + 2], *chunks[max(0, at - 1) : at]]:
            yield replace(leader, chunk_tokens=chunk)
        for seqs in self._batches(leader):
            yield replace(leader, max_num_seqs=seqs)

    def _batches(self, leader: Layout) -> list[int]:
        """Return smaller limits of a batch that might do as well, the most likely one first, and then a neighbour.

        The sequences that decode at a time are the tokens a second, times the time of a token (Little's law).
        """
        low_per_s = self.curve(leader).low_per_s
        at_low = [point for point in self.points.get(leader, ()) if point.rate_per_s == low_per_s]
        if not at_low:
            return []
        figures = at_low[0].figures
        batch = figures.output_tokens_per_s * figures.tpot_p50_s / leader.decode
        guess = 2 ** math.ceil(math.log2(max(1.0, batch * _ROOM)))
        guess = min(guess, leader.max_num_seqs // 2)
        other = replace(leader, max_num_seqs=guess)
        kept = other not in self.points or self.curve(other).low_per_s >= low_per_s
        return [one for one in (guess, guess // 2 if kept else 2 * guess) if 0 < one < leader.max_num_seqs]

    def open_rate(self, challenger: Layout) -> float | None:
        """Return the rate that a challenger must be measured at next. None: its race is over.

        It must keep the leader's goodput, and where that stays open, it must keep a rate that the leader missed. One miss ends
        its race. A smaller batch need not be better, so it must only keep a rate that the leader kept. Infinite: the challenger
        must be settled like a leader.
        """
        curve, best, settings = self.curve(challenger), self.curve(self.leader), self.settings
        smaller = replace(challenger, max_num_seqs=self.leader.max_num_seqs) == self.leader
        goodput = best.goodput_per_s()
        limit = best.high_per_s if math.isfinite(best.high_per_s) else goodput
        first = (best.low_per_s if smaller else goodput) or limit
        if first == 0.0:
            return None  # the leader has no rate to be compared at
        done = curve.settled(settings.reachable_tolerance, settings.floor_per_s) or curve.points >= settings.max_points
        if done or curve.missed_at(first):
            return None
        for rate in (first, limit):
            if rate not in curve.rates and not curve.missed_at(rate):
                return rate
        return None if smaller else math.inf


def families(settings: SearchSettings, points: Sequence[Point]) -> list[TestFamily]:
    """Return the families that the settings name, for each pair of degrees the colocated one first: it is the baseline."""
    found = []
    for degrees in settings.degrees:
        for prefills in settings.splits(*degrees):
            if prefills:
                group = TestFamily(settings, degrees, prefills, {})
                for point in points:
                    if not point.refused and group.has(point.layout):
                        group.points.setdefault(point.layout, []).append(point)
                found.append(group)
    return found
