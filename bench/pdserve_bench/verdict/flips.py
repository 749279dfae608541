"""Changes with which the answer becomes another one, by the calibrated model. Pure."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from pdserve_bench.verdict import model
from pdserve_bench.verdict.data import DecisionData, EstimateData, Fit, FlipData
from pdserve_bench.verdict.intervals import MARGIN
from pdserve_bench.verdict.model import NO_TARGET_S, Scenario

MOST_FACTOR: Final = 16.0
"""The largest change that is tried, in both directions: farther away the fitted times mean nothing."""
STEPS: Final = 16
"""Factors that are tried in each direction, before the interval between two of them is halved."""
HALVINGS: Final = 12
WORST_ERROR: Final = 3.0
"""No estimate is made where the model is farther than this factor from the measured goodput."""


@dataclass(frozen=True, slots=True)
class Lever:
    """One thing that may change: how it changes the scenario, and its present value. None: the value is not known."""

    name: str
    change: Callable[[Scenario, float], Scenario]
    present: Callable[[Fit, Scenario], float | None]


LEVERS: Final = (
    Lever("prompt", lambda at, f: replace(at, prompt=f), lambda fit, _: fit.prompt_tokens),
    Lever("output", lambda at, f: replace(at, output=f), lambda fit, _: fit.output_tokens),
    Lever("tpot", lambda at, f: replace(at, tpot_s=at.tpot_s * f), lambda _, at: at.tpot_s),
    Lever("ttft", lambda at, f: replace(at, ttft_s=at.ttft_s * f), lambda _, at: at.ttft_s),
    Lever("link", lambda at, f: replace(at, link=f), lambda _fit, _at: None),
    Lever("workers", lambda at, f: replace(at, workers=max(2, round(at.workers * f))), lambda _, at: at.workers),
)


def flips(fitted: Fit, now: Scenario, ratio: EstimateData, decision: DecisionData) -> tuple[FlipData, ...]:
    """Return the nearest flip of each lever, in each direction in which there is one.

    A decided answer flips where the ratio crosses 1. One that is not decided is decided where the near end of its interval
    crosses 1. Nothing is returned where the model is too far from the measured goodput.
    """
    errors = (fitted.apart_error, fitted.together_error)
    if not ratio.value or any(one is None or not 1 / WORST_ERROR <= one <= WORST_ERROR for one in errors):
        return ()
    absent = {name for name, target_s in (("tpot", now.tpot_s), ("ttft", now.ttft_s)) if target_s >= NO_TARGET_S}
    tried = [(lever, direction) for lever in LEVERS if lever.name not in absent for direction in (1, -1)]
    found = [_nearest(lever, direction, fitted, now, ratio, decision) for lever, direction in tried]
    return tuple(sorted((one for one in found if one is not None), key=lambda one: abs(math.log(one.factor))))


def _nearest(
    lever: Lever, direction: int, fitted: Fit, now: Scenario, ratio: EstimateData, decision: DecisionData
) -> FlipData | None:
    """Return the nearest flip of a lever in one direction. None: there is none in the range."""
    assert ratio.value is not None
    present = relative(fitted, now)

    @functools.cache
    def change(factor: float) -> float | None:
        other = relative(fitted, lever.change(now, factor))
        return other / present if other is not None and present else None

    ends = (ratio.low, ratio.value, math.inf if ratio.high is None else ratio.high)
    wanted = {DecisionData.DISAGGREGATE: [DecisionData.COLOCATE], DecisionData.COLOCATE: [DecisionData.DISAGGREGATE]}.get(
        decision, [DecisionData.DISAGGREGATE, DecisionData.COLOCATE]
    )
    undecided = len(wanted) == 2
    best: FlipData | None = None
    for to in wanted:
        if undecided:
            low, high = ends[0], ends[2]
            level = min(low, high / MARGIN) if to is DecisionData.DISAGGREGATE else max(high, low * MARGIN)
        else:
            level = ends[1]
        factor = crossing(change, level, to, direction)
        if factor is None or (best is not None and abs(math.log(factor)) >= abs(math.log(best.factor))):
            continue
        sides: list[float | None] = []
        if not undecided and lever.name != "workers":
            sides = [crossing(change, one, to, direction) for one in (ends[0], ends[2])]
        best = _flip(lever, factor, sides, fitted, now, to)
    return best


def _flip(lever: Lever, factor: float, sides: list[float | None], fitted: Fit, now: Scenario, to: DecisionData) -> FlipData:
    if lever.name == "workers":
        value: float | None = float(max(2, round(now.workers * factor)))
        factor = max(2, round(now.workers * factor)) / now.workers
    else:
        present = lever.present(fitted, now)
        value = None if present is None else present * factor
    known = sorted(one for one in sides if one is not None)
    low, high = (known[0], known[1]) if len(known) == 2 else (None, None)
    return FlipData(lever.name, factor, low, high, value, to)


def relative(fitted: Fit, at: Scenario) -> float | None:
    """Return the model's own ratio of two pools to one. None: neither serves anything. It is infinite where one pool serves
    nothing."""
    two, one = model.apart(fitted, at), model.together(fitted, at)
    if not one:
        return math.inf if two else None
    return two / one


def crossing(change: Callable[[float], float | None], level: float, to: DecisionData, direction: int) -> float | None:
    """Return the factor nearest to 1 for which the ratio `level`, times its change, is on the other side of 1.

    direction: 1 tries factors above 1, and -1 tries those below. None: there is none up to `MOST_FACTOR`, or the ratio
    ends before, because neither side serves anything.
    """

    def there(factor: float) -> bool | None:
        by = change(factor)
        if by is None or not level or math.isinf(level):
            return None
        return level * by > 1 if to is DecisionData.DISAGGREGATE else level * by < 1

    inside = 0.0
    for step in range(1, STEPS + 1):
        exponent = direction * math.log(MOST_FACTOR) * step / STEPS
        if (reached := there(math.exp(exponent))) is None:
            return None
        if reached:
            return _halved(there, inside, exponent)
        inside = exponent
    return None


def _halved(there: Callable[[float], bool | None], inside: float, outside: float) -> float:
    for _ in range(HALVINGS):
        middle = (inside + outside) / 2
        if there(math.exp(middle)):
            outside = middle
        else:
            inside = middle
    return math.exp(outside)
