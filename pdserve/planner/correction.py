"""Corrections: the factor by which a pool's need grows while requests miss their targets, and which decays afterwards.

The formulas of the other files leave out much: bursts, unequal workers, the network. A factor learns what they leave out. So
it grows only while nobody is on the way to the pool and no limit stops a larger one, and only until it asks for one worker
more. Otherwise it would go on growing while the first worker that it asked for loads its weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pdserve.planner.limits import Targets
from pdserve.planner.means import NO_MEAN, Mean
from pdserve.planner.observations import Observations
from pdserve.planner.settings import PlannerSettings

IDLE: Final = 0.5
"""Prefill workers that are busy for less than half of the time do not explain a late first token: prompts wait for decode."""


@dataclass(frozen=True, slots=True)
class Corrections:
    """The factors of both pools, and the shares of requests that met their targets of late."""

    prefill: float = 1.0
    decode: float = 1.0
    ttft_met: Mean = NO_MEAN
    tpot_met: Mean = NO_MEAN


NO_CORRECTIONS: Final = Corrections()


def corrected(
    state: Corrections,
    observed: Observations,
    targets: Targets,
    most: tuple[float, float],
    settings: PlannerSettings,
) -> Corrections:
    """Return the factors after an interval. `most`: the factors of prefill and of decode grow to these."""
    interval_s = observed.interval_s
    ttft_met = _seen(state.ttft_met, observed.ttft_met, interval_s, settings)
    tpot_met = _seen(state.tpot_met, observed.tpot_met, interval_s, settings)
    ttft = _error(ttft_met, observed.ttft_met, targets.ttft_s, targets.attainment)
    tpot = _error(tpot_met, observed.tpot_met, targets.tpot_s, targets.attainment)
    on_decode = waits_for_decode(observed)
    return Corrections(
        _moved(state.prefill, 0.0 if on_decode else ttft, most[0], interval_s, settings),
        _moved(state.decode, max(ttft if on_decode else 0.0, tpot), most[1], interval_s, settings),
        ttft_met,
        tpot_met,
    )


def waits_for_decode(observed: Observations) -> bool:
    """Tell whether requests wait for room on decode workers: they queue while prefill workers are idle."""
    return (observed.demand.queued_requests or 0.0) > 0 and (observed.prefill.utilisation or 0.0) < IDLE


def _seen(mean: Mean, met: float | None, interval_s: float, settings: PlannerSettings) -> Mean:
    """Return the mean share of requests that met a target. An interval without requests changes nothing."""
    return mean if met is None else mean.add(min(met, 1.0), interval_s, settings.smoothing_s)


def _error(met: Mean, now: float | None, target_s: float | None, attainment: float) -> float:
    """Return how much of the wanted share of requests misses the target, [0, 1]: now, and as a mean of late.

    A target or requests may be missing, which is no error.
    """
    if target_s is None or now is None or met.value is None:
        return 0.0
    return max(0.0, attainment - max(met.value, now)) / attainment


def _moved(factor: float, error: float, most: float, interval_s: float, settings: PlannerSettings) -> float:
    """Return the factor after an interval. It grows with the error up to `most` and stays above, or decays to 1."""
    if error > 0:
        grown = factor + error * interval_s / settings.correction_growth_s
        return max(factor, min(grown, most, settings.max_correction))
    return 1 + (factor - 1) * math.exp(-interval_s / settings.correction_decay_s)
