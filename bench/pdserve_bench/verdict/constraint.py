"""The binding constraint: what the first point that misses the attainment is short of. Pure.

The point of the layout with the lowest rate that misses the target attainment shows it. The target that is missed by the larger
factor names the phase, and the share of the time in which the phase's pool computes tells a lack of compute from a wait for
something else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from pdserve_bench.layout import Slo
from pdserve_bench.search.result import Point
from pdserve_bench.verdict.data import Binding, ConstraintData

BUSY: Final = 0.7
"""A pool that computes for a larger share of the time has queues: the wait of an M/D/1 queue exceeds a service time there."""
FULL: Final = 0.9
"""The share of `max_num_seqs` from which sequences wait for a place: arrivals vary."""
LINK_SHARE: Final = 0.25
"""The part of the TPOT target from which the exposed transfer counts as the reason that it is missed."""


def find(points: Sequence[Point], refused: bool, slo: Slo, attainment: float, output_tokens: float) -> ConstraintData:
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
