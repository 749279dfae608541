"""Corrections: what the share of requests in time teaches the planner, whatever its formulas leave out.

Misses teach two things. While nobody is on the way to a pool, they say that the formulas ask for too few workers: the pool's
factor grows. While workers are on their way, they say that these came too late: a pool keeps the workers of its last peaks as
long as more requests of the last day have missed their targets than may. The factor follows the rule of adaptive conformal
inference (Gibbs and Candes, 2021): each miss raises it, each request lowers it by the share that may miss, and so the share
that misses in the long run is the one that may, for any load.
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
CAUTION: Final = 4.0
"""A factor falls below 1 so many times as slowly as to 1: nothing was wrong yet."""
GROWTH: Final = 0.1
"""A pool grows at once by this part for each time that its misses are as many as may be."""
TRIED: Final = 2.0
"""More workers were tried once the pool has so many times those with which requests began to miss."""
HELPED: Final = 0.8
"""They have not helped if more than this part of the misses is left."""
FEW: Final = 0.1
"""A pool that had less than this part of the misses is not the reason for them."""


@dataclass(frozen=True, slots=True)
class PoolMisses:
    """What the misses of one pool have taught."""

    margin: float = 0.0
    """Above 0: the need has so many times its square root added (square-root staffing). Below: it is multiplied by e to this."""
    settled: Mean = NO_MEAN
    """Requests a second that missed a target because of the pool while nobody was on the way to it."""
    growing: Mean = NO_MEAN
    """The same while workers were on the way, or requests from that time still ran."""
    growing_until_s: float = -math.inf
    growth: float = 0.0
    """The requests that missed a target because of the pool in the present growth, or in the last one."""
    worst_growth: float = 0.0
    """The largest number of such requests in one growth. It fades with the time of the budget."""
    share: Mean = NO_MEAN
    """The share of the requests of late that missed a target because of the pool while nobody was on the way."""
    began: tuple[int, float] | None = None
    """The workers, and this share, when the margin began to grow above 0. None: it is not above 0."""
    is_futile: bool = False
    """More workers have not helped."""

    def of(self, need: float) -> float:
        """Return the corrected need."""
        return need * math.exp(self.margin) if self.margin <= 0 else need + self.margin * math.sqrt(need)

    @property
    def missed(self) -> float:
        """Return the requests a second that missed a target because of the pool."""
        return (self.settled.value or 0.0) + (self.growing.value or 0.0)


@dataclass(frozen=True, slots=True)
class Corrections:
    """The factors of both pools, and the shares of requests that met their targets of late and over the last day."""

    prefill: PoolMisses = PoolMisses()
    decode: PoolMisses = PoolMisses()
    ended: Mean = NO_MEAN
    """Requests a second that ended or were refused, over the time of the budget."""
    missed: Mean = NO_MEAN
    """Those of them that missed a target."""
    rate: Mean = NO_MEAN
    """Requests a second that ended, of late."""

    @property
    def missed_share(self) -> float:
        """Return the share of the requests of the last day that missed a target."""
        return (self.missed.value or 0.0) / ended if (ended := self.ended.value) else 0.0

    def keeps_peaks(self, pool: PoolMisses, targets: Targets, settings: PlannerSettings) -> bool:
        """Tell whether a pool keeps the workers of its last peaks: with another rise like the worst one, too many requests would
        have missed."""
        ended_s = self.ended.value or 0.0
        if not ended_s:
            return False
        seconds = -settings.budget_s * math.log(max(1.0 - self.ended.weight, 1e-9))
        missed = (self.missed.value or 0.0) * seconds + pool.worst_growth
        return missed > (1 - targets.attainment) * ended_s * seconds and pool.worst_growth > FEW * missed


NO_CORRECTIONS: Final = Corrections()


def corrected(
    state: Corrections,
    observed: Observations,
    targets: Targets,
    needs: tuple[float, float],
    most: tuple[float, float],
    is_growing: tuple[bool, bool],
    request_s: float,
    settings: PlannerSettings,
) -> Corrections:
    """Return the corrections after an interval.

    needs: the workers that prefill and decode need. most: their corrected needs grow to these. is_growing: workers are on the way to prefill, to decode.
    request_s: the time of a request, for which one that began before a worker came still runs.
    """
    missed, dt = observed.missed, observed.interval_s
    refused = observed.refused or 0.0
    on_decode = waits_for_decode(observed)
    prefill = missed.prefill_queue + missed.prefill + (0.0 if on_decode else refused)
    decode = missed.queue + missed.colocated + missed.first_decode + missed.steps + (refused if on_decode else 0.0)
    ended = (observed.ended or 0.0) + refused
    all_missed = min(prefill + decode + missed.transfer + missed.failure / 2, ended)
    rate = state.rate.add(ended / dt, dt, settings.memory_s)
    total = state.prefill.missed + state.decode.missed
    overdrawn = state.missed_share > 1 - targets.attainment

    def moved(pool: PoolMisses, workers: int, count: float, need: float, most: float, is_growing: bool) -> PoolMisses:
        until_s = observed.now_s + request_s if is_growing else pool.growing_until_s
        growing = observed.now_s <= until_s
        share = max(pool.missed / total, 0.5) if total > 0 else 1.0
        counted = 0.0 if growing and pool.margin >= 0.0 else count
        late = pool.share if growing or not ended else pool.share.add(min(1.0, count / ended), dt, settings.memory_s)
        margin, began, is_futile = pool.margin, pool.began, pool.is_futile
        if rate.value and need > 0:
            allowed = (1 - targets.attainment) * ended * share if pool.margin <= 0.0 or not overdrawn else 0.0
            step = (counted - allowed) / (rate.value * settings.correction_growth_s)
            most += max(1.0, workers * min(1.0, GROWTH * (late.value or 0.0) / (1 - targets.attainment)))
            margin = _margin(pool, need, step, most if not is_futile else 0.0, settings)
        if margin <= 0.0:
            began, is_futile = None, False
        elif began is None:
            began = (workers, max(late.value or 0.0, 1 - targets.attainment))
        elif not growing and workers >= TRIED * began[0] and (late.value or 0.0) > HELPED * began[1]:
            is_futile = True
        growth = (pool.growth if observed.now_s - dt <= pool.growing_until_s else 0.0) + count if growing else pool.growth
        return PoolMisses(
            margin,
            pool.settled.add(0.0 if growing else count / dt, dt, settings.budget_s),
            pool.growing.add(count / dt if growing else 0.0, dt, settings.budget_s),
            until_s,
            growth,
            max(growth, pool.worst_growth * math.exp(-dt / settings.budget_s)),
            late,
            began,
            is_futile,
        )

    return Corrections(
        moved(state.prefill, observed.prefill.ready, prefill, needs[0], most[0], is_growing[0]),
        moved(state.decode, observed.decode.ready, decode, needs[1], most[1], is_growing[1]),
        state.ended.add(ended / dt, dt, settings.budget_s),
        state.missed.add(all_missed / dt, dt, settings.budget_s),
        rate,
    )


def _margin(pool: PoolMisses, need: float, step: float, most: float, settings: PlannerSettings) -> float:
    """Return the margin after a step of the logarithm of the corrected need."""
    if step <= 0.0:
        step /= CAUTION if pool.margin <= 0.0 else 1.0
    workers = pool.of(need)
    grown = workers * math.exp(step)
    if step > 0.0:
        grown = max(workers, min(grown, max(most, need), settings.max_correction * max(need, 1.0)))
    grown = max(grown, settings.min_correction * need)
    return (grown - need) / math.sqrt(need) if grown > need else math.log(grown / need)


def waits_for_decode(observed: Observations) -> bool:
    """Tell whether requests wait for room on decode workers: they queue while prefill workers are idle."""
    return (observed.demand.queued_requests or 0.0) > 0 and (observed.prefill.utilisation or 0.0) < IDLE
