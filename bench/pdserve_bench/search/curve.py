"""The attainment of one layout against the rate, as its points show it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdserve_bench.search.result import Point
from pdserve_bench.search.settings import SearchSettings

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
