"""Points of a result that figures are taken from. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

from pdserve_bench.layout import Layout
from pdserve_bench.search.result import GoodputResult, Point
from pdserve_bench.verdict.data import ComparedData, MovedData

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
