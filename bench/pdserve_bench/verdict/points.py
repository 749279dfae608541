"""Points of a result that figures are taken from, and the intervals of its goodputs. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from pdserve_bench.layout import Layout
from pdserve_bench.search.result import GoodputResult, LayoutResult, Point
from pdserve_bench.verdict.data import ComparedData, DecisionData, EstimateData, MovedData

SAME_RATE: Final = 1.25
"""Points whose rates differ by a larger factor are not compared with each other."""


def counted(result: GoodputResult) -> tuple[Point, ...]:
    """Return the points that count: they have requests and a rate, and were not refused."""
    return tuple(one for one in result.points if not one.refused and one.requests and one.rate_per_s > 0)


def of_layout(points: Iterable[Point], layout: Layout) -> list[Point]:
    """Return the points of a layout by their rates."""
    return sorted((one for one in points if one.layout == layout), key=lambda one: one.rate_per_s)


def nearest(points: Iterable[Point], rate_per_s: float) -> Point | None:
    """Return the point whose rate is nearest to this one, by ratio. None: there are no points, or the rate is 0."""
    if rate_per_s <= 0:
        return None
    return min(points, key=lambda one: abs(math.log(one.rate_per_s / rate_per_s)), default=None)


def at_same_rate(apart: Sequence[Point], together: Sequence[Point], rate_per_s: float) -> tuple[Point, Point] | None:
    """Return a point of each kind: their rates are nearly the same, and near the given one.

    None: no two rates are within `SAME_RATE` of each other, or the given rate is 0.
    """
    pairs = [(a, b) for a in apart for b in together if 1 / SAME_RATE <= a.rate_per_s / b.rate_per_s <= SAME_RATE]
    if rate_per_s <= 0 or not pairs:
        return None

    def distance(pair: tuple[Point, Point]) -> float:
        a, b = (math.log(one.rate_per_s / rate_per_s) for one in pair)
        return 4 * abs(a - b) + abs(a + b) / 2

    return min(pairs, key=distance)


def compared(pair: tuple[Point, Point] | None) -> ComparedData | None:
    """Return what two pools gain and pay at a pair of points."""
    if pair is None:
        return None
    apart, together = pair[0].figures, pair[1].figures
    return ComparedData(
        apart_rate_per_s=pair[0].rate_per_s,
        together_rate_per_s=pair[1].rate_per_s,
        apart_itl_p99_s=apart.itl_p99_s,
        together_itl_p99_s=together.itl_p99_s,
        itl_p99_gained_s=together.itl_p99_s - apart.itl_p99_s,
        apart_ttft_p50_s=apart.ttft_p50_s,
        together_ttft_p50_s=together.ttft_p50_s,
        ttft_p50_paid_s=apart.ttft_p50_s - together.ttft_p50_s,
        apart_ttft_p99_s=apart.ttft_p99_s,
        together_ttft_p99_s=together.ttft_p99_s,
    )


def moved(point: Point | None) -> MovedData | None:
    """Return the traffic between the pools at a point."""
    if point is None:
        return None
    figures = point.figures
    each = figures.kv_bytes_per_request
    return MovedData(point.rate_per_s, each, each * point.rate_per_s, figures.exposed_transfer_p50_s)


# Intervals of a ratio of two goodputs, and what they decide. Pure.
#
# The interval of the ratio follows from the two intervals on the logarithmic scale (the square-and-add method of Zou and
# Donner, Statistics in Medicine 27, 2008). The two goodputs are measured apart from each other, so they are independent.


MARGIN: Final = 1.05
"""Two goodputs within this ratio of each other are equal for an operator. One pool is simpler, so it is then recommended.
`pdserve capacity` uses the same margin."""


def finite(value: float) -> float | None:
    """Return the number, or None where it is infinite or none."""
    return value if math.isfinite(value) else None


def estimate(one: LayoutResult) -> EstimateData:
    """Return the goodput of a layout. The interval always holds the value."""
    value, low, high = one.goodput_per_s, one.low_per_s, one.high_per_s
    return EstimateData(value, max(0.0, min(low, value)), finite(max(high, value)))


def of_one_rank(one: LayoutResult) -> LayoutResult:
    """Return the goodput of a layout as that of one of its ranks."""
    ranks = one.layout.ranks
    return replace(
        one, goodput_per_s=one.goodput_per_s / ranks, low_per_s=one.low_per_s / ranks, high_per_s=one.high_per_s / ranks
    )


def of_kind(results: Iterable[LayoutResult]) -> EstimateData:
    """Return the goodput of the best of several layouts. Its ends are the largest ends: any of the layouts may be the best."""
    ends = [estimate(one) for one in results]
    highs = [one.high for one in ends]
    return EstimateData(
        max(one.value or 0.0 for one in ends),
        max(one.low for one in ends),
        None if None in highs else max(high for high in highs if high is not None),
    )


def ratio_of(above: EstimateData, below: EstimateData) -> EstimateData:
    """Return `above` over `below`. The value is None when `below` is 0."""
    assert above.value is not None
    assert below.value is not None
    if not below.value:
        return EstimateData(None, above.low / below.high if below.high else 0.0, None)
    if not above.value:
        return EstimateData(0.0, 0.0, finite(above.high / below.low if above.high is not None and below.low else math.inf))
    value = above.value / below.value
    down = math.hypot(_log(above.value, above.low), _log(below.high, below.value))
    up = math.hypot(_log(above.high, above.value), _log(below.value, below.low))
    return EstimateData(value, value * math.exp(-down), finite(value * math.exp(up)) if up < 700 else None)


def _log(above: float | None, below: float | None) -> float:
    """Return log(above / below). It is infinite where there is no upper end, and where the lower one is 0."""
    return math.log(above / below) if above is not None and below else math.inf


def decided(low: float, high: float | None) -> DecisionData:
    """Return the decision for a ratio that lies between these ends."""
    top = math.inf if high is None else high
    if low >= 1 / MARGIN and top <= MARGIN:
        return DecisionData.EQUAL
    if low > 1:
        return DecisionData.DISAGGREGATE
    return DecisionData.COLOCATE if top < 1 else DecisionData.UNDECIDED
