"""A small model of the cluster, calibrated on the measured points. It estimates what was not measured. Pure.

It has the forms of `pdserve.capacity.placements` (an M/D/1 queue for prompts, Little's law for decodes, prompts that delay the
decodes beside them), but its times are fitted to the points and not to data sheets. Its goodput is then scaled to the measured
one, for each kind of layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median
from typing import Final

from pdserve.capacity.placements import last_load, queue_rate, queue_s
from pdserve.capacity.verdict import best_split
from pdserve_bench.layout import Slo
from pdserve_bench.search.result import Point
from pdserve_bench.verdict.data import Fit

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
