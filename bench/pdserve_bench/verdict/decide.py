"""A verdict follows from the result of a search. Pure: no clock, no files, no text.

The two kinds of layouts are compared by the interval of the ratio of their goodputs (docs/design/0046). Where the interval
allows both answers, the verdict says so, and recommends one pool because it is simpler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from pdserve_bench.layout import Layout, Slo
from pdserve_bench.search.result import GoodputResult, LayoutResult, Point
from pdserve_bench.verdict import model, points
from pdserve_bench.verdict.data import (
    Binding,
    CandidateData,
    ConstraintData,
    CostData,
    DecisionData,
    DegreeData,
    EstimateData,
    Fit,
    FlipData,
    VerdictData,
)
from pdserve_bench.verdict.doubts import Facts, describe, doubts, prompt_tokens
from pdserve_bench.verdict.model import flips
from pdserve_bench.verdict.points import decided, estimate, of_kind, ratio_of


def decide(result: GoodputResult, price_per_worker_hour: float | None = None) -> VerdictData:
    """Return the verdict of a result. price_per_worker_hour: US dollars."""
    valid = points.counted(result)
    apart = _best(result.best_disaggregated)
    together = _best(result.best_colocated)
    ratio = _ratio(result)
    decision = _decision(apart, together, ratio)
    chosen = apart if decision is DecisionData.DISAGGREGATE or together is None else together
    if decision is DecisionData.ONE_SIDE:
        chosen = apart or together
    fitted, found = _model(result, valid, apart, together, ratio, decision)
    rivals = _rivals(result, chosen)
    goodput = min((one.goodput.value or 0.0 for one in (apart, together) if one), default=0.0)
    apart_points = points.of_layout(valid, apart.layout) if apart else []
    together_points = points.of_layout(valid, together.layout) if together else []
    facts = Facts(result.meta)
    return VerdictData(
        decision=decision,
        slo=result.slo,
        attainment=result.attainment,
        workers=chosen.layout.workers if chosen else 0,
        chosen=chosen,
        apart=apart,
        together=together,
        ratio=ratio,
        rivals=rivals,
        device=result.device,
        degrees=tuple(_degrees(result)),
        compared=points.compared(points.at_same_rate(apart_points, together_points, goodput)),
        moved=points.moved(points.nearest(apart_points, apart.goodput.value or 0.0)) if apart else None,
        cost=_cost(valid, chosen, together, price_per_worker_hour),
        constraint=_constraint(result, valid, chosen),
        fit=fitted,
        flips=found,
        doubts=doubts(result, valid, decision, [one for one in (apart, together) if one], len(rivals), fitted, found, ratio),
        candidates=tuple(sorted(map(candidate, result.layouts), key=lambda one: -(one.goodput.value or 0.0))),
        points=len(result.points),
        requests=sum(one.requests for one in valid),
        measured_s=sum(one.measured_s for one in result.points),
        conditions={"workload": describe(result.workload), **facts.conditions()},
    )


def candidate(one: LayoutResult) -> CandidateData:
    """Return a layout's result with its interval in order."""
    return CandidateData(one.layout, one.layout.name, estimate(one), one.settled)


def _best(one: LayoutResult | None) -> CandidateData | None:
    return None if one is None else candidate(one)


def _ratio(result: GoodputResult) -> EstimateData | None:
    """Return the ratio of the two kinds of layouts. None: one kind is missing."""
    apart = [one for one in result.layouts if one.layout.disaggregated]
    together = [one for one in result.layouts if not one.layout.disaggregated]
    if not apart or not together:
        return None
    return ratio_of(of_kind(apart), of_kind(together))


def _decision(apart: CandidateData | None, together: CandidateData | None, ratio: EstimateData | None) -> DecisionData:
    if apart is None and together is None:
        return DecisionData.UNMEASURED
    goodputs = [one.goodput for one in (apart, together) if one]
    if not any(one.value for one in goodputs):
        return DecisionData.OPEN if any(one.high is None for one in goodputs) else DecisionData.NOTHING
    if ratio is None:
        return DecisionData.ONE_SIDE
    return decided(ratio.low, ratio.high)


def _degrees(result: GoodputResult) -> Iterator[DegreeData]:
    """Yield what a higher degree gains or costs, for the workers of each pool of two and for colocated ones."""
    apart = [one for one in result.layouts if one.layout.disaggregated]
    together = [one for one in result.layouts if not one.layout.disaggregated]
    places: tuple[tuple[str, list[LayoutResult], Callable[[Layout], int]], ...] = (
        ("prefill", apart, lambda layout: layout.prefill_ranks),
        ("decode", apart, lambda layout: layout.decode_ranks),
        ("colocated", together, lambda layout: layout.decode_ranks),
    )
    for place, layouts, ranks_of in places:
        of_ranks = {
            ranks: [one for one in layouts if ranks_of(one.layout) == ranks]
            for ranks in sorted({ranks_of(one.layout) for one in layouts})
        }
        (least, lowest), *higher = of_ranks.items() or [(0, [])]
        for ranks, alike in higher:
            each, least_each = (of_kind(map(points.of_one_rank, some)) for some in (alike, lowest))
            ratio = ratio_of(each, least_each)
            answer = decided(ratio.low, ratio.high)
            known = answer is not DecisionData.UNDECIDED and bool(each.value or least_each.value)
            names = [max(some, key=lambda one: one.goodput_per_s).layout.name for some in (alike, lowest)]
            pays = answer is DecisionData.DISAGGREGATE if known else None
            yield DegreeData(place, ranks, least, names[0], names[1], each, least_each, ratio, pays)


def _rivals(result: GoodputResult, chosen: CandidateData | None) -> tuple[CandidateData, ...]:
    """Return the other layouts of the chosen kind whose goodput may be as high as the lower end of the chosen one."""
    if chosen is None or not chosen.goodput.value:
        return ()
    others = [
        candidate(one)
        for one in result.layouts
        if one.layout != chosen.layout and one.layout.disaggregated == chosen.layout.disaggregated
    ]
    return tuple(one for one in others if one.goodput.high is None or one.goodput.high >= chosen.goodput.low)


def _constraint(result: GoodputResult, valid: Sequence[Point], chosen: CandidateData | None) -> ConstraintData | None:
    """Return what binds the chosen layout. None: it has no points."""
    if chosen is None:
        return None
    own = points.of_layout(valid, chosen.layout)
    if not any(one.layout == chosen.layout for one in result.points):
        return None
    refused = any(one.refused and one.layout == chosen.layout for one in result.points)
    return find_constraint(own, refused, result.slo, result.attainment, model.tokens_of_output(own))


def _model(
    result: GoodputResult,
    valid: Sequence[Point],
    apart: CandidateData | None,
    together: CandidateData | None,
    ratio: EstimateData | None,
    decision: DecisionData,
) -> tuple[Fit | None, tuple[FlipData, ...]]:
    """Return the calibrated model and the flips. Both are empty without points or goodput of both kinds."""
    if apart is None or together is None or ratio is None or not apart.goodput.value or not together.goodput.value:
        return None, ()
    if len({*apart.layout.degrees, *together.layout.degrees}) > 1:
        return None, ()  # the model has one time of a prompt and one of a step, for workers that are alike
    near = [one for one in valid if one.layout in (apart.layout, together.layout)]
    fitted = model.fit(near, Facts(result.meta).prompt_tokens or prompt_tokens(result.workload))
    if fitted is None:
        return None, ()
    sequences = max(apart.layout.max_num_seqs, together.layout.max_num_seqs)
    now = model.scenario(result.slo, result.attainment, apart.layout.workers, sequences)
    fitted = model.calibrated(fitted, now, apart.goodput.value, together.goodput.value)
    return fitted, flips(fitted, now, ratio, decision)


def _cost(
    valid: Sequence[Point], chosen: CandidateData | None, together: CandidateData | None, price_per_worker_hour: float | None
) -> CostData | None:
    """Return the tokens for the money. None: the recommended layout has no goodput or no points."""
    if chosen is None or not chosen.goodput.value:
        return None
    hourly = _hourly(valid, chosen)
    if hourly is None or hourly.value is None:
        return None
    baseline = None if together is None or together == chosen else _hourly(valid, together)
    return CostData(
        output_tokens_per_s=hourly.value * chosen.layout.ranks / 3600,
        tokens_per_worker_hour=hourly,
        price_per_worker_hour=price_per_worker_hour,
        tokens_per_dollar=_scaled(hourly, price_per_worker_hour),
        baseline_tokens_per_worker_hour=baseline,
        baseline_tokens_per_dollar=_scaled(baseline, price_per_worker_hour),
    )


def _hourly(valid: Sequence[Point], one: CandidateData) -> EstimateData | None:
    """Return the output tokens of a rank in an hour at the goodput of a layout, from its nearest point."""
    point = points.nearest(points.of_layout(valid, one.layout), one.goodput.value or 0.0)
    if point is None:
        return None
    each = point.figures.output_tokens_per_s / point.rate_per_s * 3600 / one.layout.ranks
    value, low, high = one.goodput.value or 0.0, one.goodput.low, one.goodput.high
    return EstimateData(value * each, low * each, None if high is None else high * each)


def _scaled(hourly: EstimateData | None, price: float | None) -> EstimateData | None:
    """Return tokens for a dollar. None: there is no price."""
    if hourly is None or hourly.value is None or not price:
        return None
    return EstimateData(hourly.value / price, hourly.low / price, None if hourly.high is None else hourly.high / price)


# The binding constraint: what the first point that misses the attainment is short of. Pure.
#
# The point of the layout with the lowest rate that misses the target attainment shows it. The target that is missed by the
# larger factor names the phase, and the share of the time in which the phase's pool computes tells a lack of compute from a
# wait for something else.


BUSY: Final = 0.7
"""A pool that computes for a larger share of the time has queues: the wait of an M/D/1 queue exceeds a service time there."""
FULL: Final = 0.9
"""The share of `max_num_seqs` from which sequences wait for a place: arrivals vary."""
LINK_SHARE: Final = 0.25
"""The part of the TPOT target from which the exposed transfer counts as the reason that it is missed."""


def find_constraint(
    points: Sequence[Point], refused: bool, slo: Slo, attainment: float, output_tokens: float
) -> ConstraintData:
    """Return the constraint of one layout from its counted points, by rate.

    refused: a point of the layout was refused, so the generator was late.
    """
    missed = [one for one in points if one.attainment < attainment]
    if not missed:
        return ConstraintData(Binding.GENERATOR if refused else Binding.UNSEEN)
    point = missed[0]
    figures = point.figures
    sequences = figures.output_tokens_per_s / point.layout.decode * figures.tpot_p50_s if point.layout.decode else 0.0
    return ConstraintData(
        _binding(point, slo, sequences, output_tokens),
        point.rate_per_s,
        figures.ttft_p99_s,
        figures.tpot_p99_s,
        figures.prefill_busy_share,
        figures.decode_busy_share,
        sequences,
        figures.exposed_transfer_p50_s,
    )


def _binding(point: Point, slo: Slo, sequences: float, output_tokens: float) -> Binding:
    figures, layout = point.figures, point.layout
    late_first = _overshoot(figures.ttft_p99_s, slo.ttft_s)
    if late_first >= _overshoot(figures.tpot_p99_s, slo.tpot_s):
        busy = figures.prefill_busy_share if layout.disaggregated else figures.decode_busy_share
        if sequences >= FULL * layout.max_num_seqs:
            return Binding.SEQUENCES
        return Binding.MEMORY_OR_ROUTER if busy is not None and busy < BUSY else Binding.PREFILL_COMPUTE
    target = slo.tpot_s or math.inf
    if layout.disaggregated:
        share = figures.exposed_transfer_p50_s / max(1.0, output_tokens - 1) / target
        return Binding.LINK if share >= LINK_SHARE else Binding.DECODE_BANDWIDTH
    return Binding.DECODE_BANDWIDTH if figures.itl_p50_s >= target else Binding.INTERFERENCE


def _overshoot(measured_s: float, target_s: float | None) -> float:
    return measured_s / target_s if target_s else 0.0
