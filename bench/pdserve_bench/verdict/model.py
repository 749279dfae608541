"""A small model of the cluster, calibrated on the measured points. It estimates what was not measured. Pure.

It has the forms of `pdserve.capacity.placements` (an M/D/1 queue for prompts, Little's law for decodes, prompts that delay the
decodes beside them), but its times are fitted to the points and not to data sheets. Its goodput is then scaled to the measured
one, for each kind of layout.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median
from typing import Final

from pdserve.capacity.placements import last_load, queue_rate, queue_s
from pdserve.capacity.verdict import best_split
from pdserve_bench.layout import Slo
from pdserve_bench.search.result import Point
from pdserve_bench.verdict import model
from pdserve_bench.verdict.data import DecisionData, EstimateData, Fit, FlipData
from pdserve_bench.verdict.points import MARGIN

BUSY_RANGE: Final = (0.02, 0.98)
"""Busy shares outside of it say little about the time of one prompt."""
NO_TARGET_S: Final = 1e6
"""The target where there is none, in seconds. It is so long that it never binds."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The conditions that may change. Factors are multiples of what was measured."""

    workers: int
    ttft_s: float
    tpot_s: float
    attainment: float
    max_num_seqs: int
    prompt: float = 1.0
    output: float = 1.0
    link: float = 1.0


def scenario(slo: Slo, attainment: float, workers: int, max_num_seqs: int) -> Scenario:
    """Return the conditions that were measured."""
    return Scenario(workers, slo.ttft_s or NO_TARGET_S, slo.tpot_s or NO_TARGET_S, attainment, max_num_seqs)


def fit(points: Sequence[Point], prompt_tokens: float | None) -> Fit | None:
    """Return the times that fit the points. None: the points of one of the kinds are missing, or no tokens were measured."""
    useful = [one for one in points if one.figures.output_tokens_per_s > 0 and one.figures.tpot_p50_s > 0]
    apart = [one for one in useful if one.layout.disaggregated]
    together = [one for one in useful if not one.layout.disaggregated]
    if not apart or not together:
        return None
    output_tokens = tokens_of_output(useful)
    step_s, sequence_s = _line([(_sequences(one), one.figures.tpot_p50_s) for one in apart])
    low, high = BUSY_RANGE
    shares = [(one.figures.prefill_busy_share, one) for one in apart]
    prompts = [share * one.layout.prefill / one.rate_per_s for share, one in shares if share and low < share < high]
    prompt_s = median(prompts) if prompts else min(one.figures.ttft_p50_s for one in apart)
    delays = [delay for one in together if (delay := _delay(one, step_s, sequence_s)) > 0]
    return Fit(
        prompt_s=prompt_s,
        prompt_beside_s=max(prompt_s, min(one.figures.ttft_p50_s for one in together)),
        delay_s=median(delays) if delays else prompt_s,
        step_s=step_s,
        sequence_s=sequence_s,
        exposed_s=median(one.figures.exposed_transfer_p50_s for one in apart),
        output_tokens=output_tokens,
        prompt_tokens=prompt_tokens,
        apart_error=None,
        together_error=None,
    )


def tokens_of_output(points: Sequence[Point]) -> float:
    """Return the mean output tokens of a request, at least 1. Overloaded points answer fewer, so the highest figure counts."""
    return max(1.0, *(one.figures.output_tokens_per_s / one.rate_per_s for one in points)) if points else 1.0


def calibrated(fitted: Fit, now: Scenario, apart_per_s: float, together_per_s: float) -> Fit:
    """Return the fit with the ratios of the measured goodputs to its own."""

    def error(measured: float, own: float) -> float | None:
        return measured / own if measured and own else None

    return replace(
        fitted, apart_error=error(apart_per_s, apart(fitted, now)), together_error=error(together_per_s, together(fitted, now))
    )


def apart(fitted: Fit, at: Scenario) -> float:
    """Return the requests a second of the best split of the workers into two pools."""
    prefill = queue_rate(fitted.prompt_s * at.prompt, at.ttft_s, at.attainment)
    gaps = max(1.0, fitted.output_tokens * at.output - 1)
    exposed = fitted.exposed_s * at.prompt / at.link / gaps
    most = float(at.max_num_seqs)
    room_s = at.tpot_s - exposed - fitted.step_s
    batch = min(most, room_s / fitted.sequence_s if fitted.sequence_s else most) if room_s >= 0 else 0.0
    decode = batch / (gaps * (fitted.step_s + fitted.sequence_s * batch + exposed)) if batch >= 1 else 0.0
    split = best_split(at.workers, prefill, decode)
    return split.requests_per_s if split else 0.0


def together(fitted: Fit, at: Scenario) -> float:
    """Return the requests a second of the same workers without a prefill pool."""
    gaps = max(1.0, fitted.output_tokens * at.output - 1)
    delay, prompt = fitted.delay_s * at.prompt, fitted.prompt_beside_s * at.prompt
    z = max(0.0, NormalDist().inv_cdf(at.attainment))

    def rate(batch: float) -> float:
        return batch / (gaps * (fitted.step_s + fitted.sequence_s * batch) + batch * delay)

    def meets(batch: float) -> bool:
        tail = fitted.step_s + fitted.sequence_s * batch + (batch + z * math.sqrt(batch)) * delay / gaps
        # The queue is of work: a prompt keeps its worker busy for the delay that it causes, and waits for its own steps too.
        wait = queue_s(delay, rate(batch), at.attainment) + prompt - delay
        return tail <= at.tpot_s and max(wait, prompt) <= at.ttft_s

    batch = last_load(meets, float(at.max_num_seqs))
    return at.workers * rate(batch) if batch > 1e-6 else 0.0


def _sequences(point: Point) -> float:
    """Return the mean sequences of a decode worker, by Little's law."""
    return point.figures.output_tokens_per_s / point.layout.decode * point.figures.tpot_p50_s if point.layout.decode else 0.0


def _delay(point: Point, step_s: float, sequence_s: float) -> float:
    """Return the delay of one prompt from a colocated point: a mean gap is the step / (1 - prompts a second * delay)."""
    step = step_s + sequence_s * _sequences(point)
    prompts_per_s = point.rate_per_s / point.layout.decode if point.layout.decode else 0.0
    return (1 - step / point.figures.tpot_p50_s) / prompts_per_s if prompts_per_s else 0.0


def _line(seen: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the intercept and the slope of the line through the points, by least squares. Neither is below 0."""
    mean_x, mean_y = (sum(one[axis] for one in seen) / len(seen) for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in seen)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in seen) / spread if spread else 0.0
    slope = min(max(0.0, slope), mean_y / mean_x if mean_x else 0.0)
    return mean_y - slope * mean_x, slope


# Changes with which the answer becomes another one, by the calibrated model. Pure.


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
