"""Corrections: what requests that miss their targets teach the planner, whatever its formulas leave out.

Misses teach two things. While nobody is on the way to a pool, they say that the formulas ask for too few workers: the margin
of the pool grows. While workers are on their way, they say that these came too late: the pool keeps room for rises such as it
has seen within the last day, as long as another one of them would make more requests of the day miss than may.

The margin follows the rule of adaptive conformal inference (Gibbs and Candes, 2021): each miss raises it, and each request
lowers it by the share that may miss. So it comes to rest, for any load, where as many requests miss as may miss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

from pdserve.planner.limits import Targets
from pdserve.planner.means import NO_MEAN, Mean
from pdserve.planner.observations import Missed, Observations
from pdserve.planner.settings import PlannerSettings

IDLE: Final = 0.5
"""Prefill workers that are busy for less than half of the time do not explain a late first token: prompts wait for decode."""
CAUTION: Final = 4.0
"""A margin falls so many times as slowly below 0 as to 0: nothing was wrong yet."""
SPENT: Final = 16.0
"""A margin above 0 falls so many times as slowly while more requests have missed within the time of the budget than may: where
3 % may, to an e-th within 18 hours."""
EVIDENCE: Final = 6.0
"""So many misses, and twice as many as may be, are hardly a chance: the pool then grows at once."""
GROWTH: Final = 0.03
"""It grows by this part for each time that its misses are as many as may be. Where few are in time, that is half."""
MOST_GROWTH: Final = 0.5
MOST_STEP: Final = 1.0
"""The largest change of the logarithm of a need in one interval."""
LEAST_PART: Final = 0.5
"""The least part of the misses that may be which lowers the margin of a pool. Both pools have at least half of them: where both
miss, so that the sum is a little more than may, and where one does, so that the other one's margin still comes to rest."""
FEW: Final = 0.1
"""A rise with less than this part of the misses of the day is no reason to keep room for others."""


@dataclass(frozen=True, slots=True)
class PoolSeen:
    """One pool in the interval, as far as its correction needs it."""

    ready: int
    need: float
    """The workers that the formulas ask for. 0: it is not known."""
    most: float
    """The corrected need may grow at least to this. 0: a limit or workers on their way forbid that it grows."""
    is_growing: bool
    """Workers are on their way, or some that were wanted are missing."""


@dataclass(frozen=True, slots=True)
class PoolCorrection:
    """The lessons of requests that missed a target because of one pool."""

    margin: float = 0.0
    """Above 0, so many times the square root of the need are added to it, or so many workers to less than one. Below, the need
    is multiplied by e to this."""
    missed: Mean = NO_MEAN
    """Requests a second, over the time of the budget, that missed a target because of the pool."""
    tried_ended: float = 0.0
    """The requests that have ended of late and since the last worker came, and below those that missed because of the pool."""
    tried_missed: float = 0.0
    growing_until_s: float | None = None
    """Until then, requests end that ran while workers were on the way. None: none ever were."""
    growth_missed: float = 0.0
    """The requests that missed because of the pool in the present growth, or in the last one."""
    worst_growth: float = 0.0
    """The most such requests of one growth. It fades with the time of the budget."""

    def of(self, need: float) -> float:
        """Return the corrected need. The square root is that of square-root staffing: what comes at random varies by it."""
        return need * math.exp(self.margin) if self.margin <= 0.0 else need + self.margin * math.sqrt(max(need, 1.0))

    def after(
        self, pool: PoolSeen, count: float, state: Corrections, observed: Observations, attainment: float, request_s: float,
        settings: PlannerSettings,
    ) -> PoolCorrection:  # fmt: skip
        """Return the correction after an interval in which `count` requests missed a target because of the pool."""
        now_s, dt, ended, may = observed.now_s, observed.interval_s, ended_of(observed), 1.0 - attainment
        until_s = now_s + request_s if pool.is_growing else self.growing_until_s
        is_growing = until_s is not None and now_s <= until_s
        kept = 0.0 if is_growing else math.exp(-dt / settings.memory_s)
        tried_missed = kept * self.tried_missed + (0.0 if is_growing else count)
        tried_ended = max(kept * self.tried_ended + (0.0 if is_growing else ended), tried_missed)
        margin = self.margin
        if state.rate.value and pool.need > 0.0:
            part = max((self.missed.value or 0.0) / total, LEAST_PART) if (total := state.missed_by_pools) else 1.0
            is_spent = state.missed_by_pools > may * (state.ended.value or 0.0)
            allowed = may * ended * part / (SPENT if margin > 0.0 and is_spent else 1.0)
            learned = 0.0 if is_growing and margin >= 0.0 else count - allowed
            step = learned / (state.rate.value * settings.correction_growth_s)
            if pool.most and tried_missed >= max(EVIDENCE, 2.0 * may * tried_ended):
                step = MOST_STEP
            excess = GROWTH * tried_missed / (may * tried_ended) if tried_missed >= 1.0 else 0.0
            most = pool.most + max(1.0, pool.ready * min(MOST_GROWTH, excess))
            margin = self._moved(pool.need, min(step, MOST_STEP), most, settings)
        goes_on = self.growing_until_s is not None and now_s - dt <= self.growing_until_s
        before = self.growth_missed if goes_on or not is_growing else 0.0
        growth = before + (count if is_growing else 0.0)
        return PoolCorrection(
            margin,
            self.missed.add(count / dt, dt, settings.budget_s),
            tried_ended,
            tried_missed,
            until_s,
            growth,
            max(growth, self.worst_growth * math.exp(-dt / settings.budget_s)),
        )

    def _moved(self, need: float, step: float, most: float, settings: PlannerSettings) -> float:
        """Return the margin after a step of the logarithm of the corrected need, which grows no further than `most`."""
        if step <= 0.0 and self.margin <= 0.0:
            step /= CAUTION
        workers = self.of(need)
        moved = workers * math.exp(step)
        if step > 0.0:
            moved = max(workers, min(moved, max(most, need)))
        moved = min(max(moved, settings.min_correction * need), settings.max_correction * max(need, 1.0))
        return (moved - need) / math.sqrt(max(need, 1.0)) if moved > need else math.log(moved / need)


@dataclass(frozen=True, slots=True)
class Corrections:
    """The corrections of both pools, and the requests that missed a target: over the time of the budget and of late."""

    prefill: PoolCorrection = PoolCorrection()
    decode: PoolCorrection = PoolCorrection()
    ended: Mean = NO_MEAN
    """Requests a second that ended or were refused, over the time of the budget."""
    missed: Mean = NO_MEAN
    """Those of them that missed a target."""
    rate: Mean = NO_MEAN
    """Requests a second that ended or were refused, of late."""
    causes: tuple[Mean, ...] = ()
    """Requests a second of late that missed a target, by the fields of `Missed`."""
    refused: Mean = NO_MEAN
    """Requests a second of late that were refused."""

    @property
    def pools(self) -> tuple[PoolCorrection, PoolCorrection]:
        """Return the corrections of prefill and of decode."""
        return self.prefill, self.decode

    @property
    def missed_by_pools(self) -> float:
        """Return the requests a second that missed a target because of either pool, over the time of the budget."""
        return (self.prefill.missed.value or 0.0) + (self.decode.missed.value or 0.0)

    @property
    def missed_share(self) -> float:
        """Return the share of the requests that missed a target, over the time of the budget."""
        return (self.missed.value or 0.0) / ended if (ended := self.ended.value) else 0.0

    def keeps_room(self, pool: PoolCorrection, attainment: float, settings: PlannerSettings) -> bool:
        """Tell whether a pool keeps room for rises: another one like the worst would make more requests miss than may."""
        seconds = settings.budget_s * self.ended.weight  # those that the means stand for
        missed = (self.missed.value or 0.0) * seconds + pool.worst_growth
        may = (1.0 - attainment) * (self.ended.value or 0.0) * seconds
        return missed > may and pool.worst_growth > FEW * missed


NO_CORRECTIONS: Final = Corrections()


def corrected(
    state: Corrections,
    observed: Observations,
    targets: Targets,
    pools: tuple[PoolSeen, PoolSeen],
    request_s: float,
    settings: PlannerSettings,
) -> Corrections:
    """Return the corrections after an interval.

    pools: prefill and decode. request_s: the time of a request; a request that began before a worker came ends so much later.
    """
    if targets.ttft_s is None and targets.tpot_s is None:
        return state
    missed, dt = observed.missed, observed.interval_s
    by_prefill, by_decode = blamed(observed)
    ended = ended_of(observed)
    count = min(by_prefill + by_decode + missed.transfer + missed.failure / 2.0, ended)
    state = Corrections(
        state.prefill,
        state.decode,
        state.ended,
        state.missed,
        state.rate.add(ended / dt, dt, settings.memory_s),
        tuple(
            mean.add(getattr(missed, field.name) / dt, dt, settings.memory_s)
            for mean, field in zip(state.causes or (NO_MEAN,) * len(fields(Missed)), fields(Missed), strict=True)
        ),
        state.refused.add((observed.refused or 0.0) / dt, dt, settings.memory_s),
    )
    prefill, decode = (
        one.after(pool, blame, state, observed, targets.attainment, request_s, settings)
        for one, pool, blame in zip((state.prefill, state.decode), pools, (by_prefill, by_decode), strict=True)
    )
    return Corrections(
        prefill,
        decode,
        state.ended.add(ended / dt, dt, settings.budget_s),
        state.missed.add(count / dt, dt, settings.budget_s),
        state.rate,
        state.causes,
        state.refused,
    )


def ended_of(observed: Observations) -> float:
    """Return the requests that ended or were refused in the interval."""
    return (observed.ended or 0.0) + (observed.refused or 0.0)


def blamed(observed: Observations) -> tuple[float, float]:
    """Return the requests that missed a target because of the prefill pool, and because of the decode pool."""
    missed, refused = observed.missed, observed.refused or 0.0
    on_decode = waits_for_decode(observed)
    prefill = missed.prefill_queue + missed.prefill + (0.0 if on_decode else refused)
    decode = missed.queue + missed.colocated + missed.first_decode + missed.steps + (refused if on_decode else 0.0)
    return prefill, decode


def waits_for_decode(observed: Observations) -> bool:
    """Tell whether requests wait or are refused for room on decode workers: prefill workers are idle meanwhile."""
    stopped = (observed.demand.queued_requests or 0.0) + (observed.refused or 0.0)
    return stopped > 0.0 and (observed.prefill.utilisation or 0.0) < IDLE
