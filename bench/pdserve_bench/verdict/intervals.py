"""Intervals of a ratio of two goodputs, and what they decide. Pure.

The interval of the ratio follows from the two intervals on the logarithmic scale (the square-and-add method of Zou and Donner,
Statistics in Medicine 27, 2008). The two goodputs are measured apart from each other, so they are independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from pdserve_bench.search.result import LayoutResult
from pdserve_bench.verdict.data import DecisionData, EstimateData

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


def of_kind(results: Iterable[LayoutResult]) -> EstimateData:
    """Return the goodput of the best of several layouts. Its ends are the largest ends: any of the layouts may be the best."""
    ends = [estimate(one) for one in results]
    highs = [one.high for one in ends]
    return EstimateData(
        max(one.value or 0.0 for one in ends),
        max(one.low for one in ends),
        None if None in highs else max(high for high in highs if high is not None),
    )


def ratio(above: EstimateData, below: EstimateData) -> EstimateData:
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
