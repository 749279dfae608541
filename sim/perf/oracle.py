"""The oracle of a load: sizes for each interval, known in advance, that attain the wanted share at a low cost.

The search with the simulator begins with the workers that the load keeps busy all the time. The pool that is to blame gets one
worker more in the intervals where requests missed most, until half of all misses lie in them, and the run is made again. The
result is attainable, so the true oracle costs at most as much. It is no lower bound: another schedule may cost less, and so may
a planner's run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from pdserve.planner.limits import Limits, PoolSizes
from sim.perf.report import ElasticReport, SimReport, SimServed

INTERVALS: Final = 48
"""The number of intervals, after each of which the sizes may change: each half hour of a day."""
MOST_RUNS: Final = 16
"""The bound of a search: each run takes as long as the planner's."""
IDLE: Final = 0.5
"""A late first token is the decode pool's fault while prefill workers are less busy: decode workers reserve first."""

Place = tuple[int, str]
"""An interval, and the pool that is to blame there."""


@dataclass(frozen=True, slots=True)
class Oracle:
    """The schedule that was found, and its result."""

    schedule: tuple[PoolSizes, ...]
    """The sizes of each interval, or one entry for all intervals."""
    attainment: float
    worker_s: float


def find(
    run: Callable[[Sequence[PoolSizes]], tuple[SimReport, ElasticReport]], first: Sequence[PoolSizes], interval_s: float,
    limits: Limits, enough: float,
) -> Oracle | None:  # fmt: skip
    """Return the first schedule that attains enough. None: no run did, or no pool may grow where requests miss."""
    schedule = list(first)
    for _ in range(MOST_RUNS):
        report, pools = run(schedule)
        missed = [one for one in report.served if not one.attained]
        attainment = 1.0 - len(missed) / len(report.served)
        if attainment >= enough:
            return Oracle(tuple(schedule), attainment, pools.worker_s)
        places = _to_blame(missed, pools, interval_s, len(schedule))
        grown = _grown(schedule, places, limits, max(0.5 * len(missed), len(missed) - (1.0 - enough) * len(report.served)))
        if grown == schedule:
            return None
        schedule = grown
    return None


def _to_blame(missed: Sequence[SimServed], pools: ElasticReport, interval_s: float, intervals: int) -> dict[Place, float]:
    """Return the misses of each place.

    Slow tokens count in equal parts in the intervals from a request's arrival to its end. A first token that came late, or was
    predicted to come late, counts in the intervals before the request's arrival in which its queue grew: at most as long as the
    target.
    """
    seen: list[list[float]] = [[] for _ in range(intervals)]
    for at in pools.history:
        seen[min(intervals - 1, int(at.observed.now_s / interval_s))].append(at.observed.prefill.utilisation or 0.0)
    places: defaultdict[Place, float] = defaultdict(float)
    for one in missed:
        slow = not one.error and one.slo.tpot_met(one.report.tpot_s) is False
        begin_s = one.arrived_s - (0.0 if slow else one.slo.ttft_s or 0.0)
        ends = (max(0.0, begin_s), one.ended_s if slow else one.arrived_s)
        first, last = (min(intervals - 1, int(time_s / interval_s)) for time_s in ends)
        for interval in range(first, last + 1):
            idle = fmean(seen[interval] or [0.0]) < IDLE
            places[interval, "decode" if slow or idle else "prefill"] += 1.0 / (last + 1 - first)
    return places


def _grown(schedule: Sequence[PoolSizes], places: dict[Place, float], limits: Limits, misses: float) -> list[PoolSizes]:
    """Return the schedule with one worker more at the places that missed most, and together so many times."""
    grown = list(schedule)
    for (interval, pool), missed in sorted(places.items(), key=lambda one: -one[1]):
        sizes = grown[interval]
        if pool == "decode" and sizes.decode < limits.decode.max_workers:
            grown[interval] = PoolSizes(sizes.prefill, sizes.decode + 1)
        elif pool == "prefill" and sizes.prefill < limits.prefill.max_workers:
            grown[interval] = PoolSizes(sizes.prefill + 1, sizes.decode)
        else:
            continue
        misses -= missed
        if misses <= 0.0:
            break
    return grown
