"""The judge of a planner on one load: the share that it attained, for how long this was too little, and its cost beside static
splits.

Costs are compared with the cheapest static split that attains the same share: the wanted share, or the planner's share where
that is less. In that case, the judge also finds the cheapest split that attains the wanted share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.planner.limits import PoolSizes
from pdserve.planner.settings import PlannerSettings
from sim.perf.cluster import run_cluster
from sim.perf.controllers import PlannerController, ScheduleController
from sim.perf.days import Day
from sim.perf.elastic import Controller, ElasticCluster, Elasticity
from sim.perf.loads import Load
from sim.perf.oracle import INTERVALS, Oracle, find
from sim.perf.report import ElasticReport, SimReport, SimServed
from sim.perf.statics import Split, best_of, run_split, search
from sim.perf.traces import TraceRequest

INTERVAL_S: Final = 5.0
"""The time between two looks of the planner, as `autoscaling.interval_s` has it by default."""
WINDOW_REQUESTS: Final = 40
"""The requests of one window: if 97 % of all requests are in time, four of 40 miss by chance in one of thirty windows."""
SHORT_OF_ASKED: Final = 0.01
"""The most by which the share of a whole day may be below the wanted share."""
FAR_BELOW_ASKED: Final = 0.05
"""A share that is this much below the wanted share must not last."""
ENOUGH_SAVED: Final = 0.85
"""The share of the best static split's cost that a planner may take where the oracle takes no more."""


@dataclass(frozen=True, slots=True)
class Below:
    """The windows whose share was far below the wanted share."""

    worst: float
    """The smallest share of a window."""
    overdue_s: float
    """The longest time beyond what the start of a worker excuses."""


def below(served: Sequence[SimServed], asked: float, rises_s: Sequence[float], excused_s: float) -> Below:
    """Find the windows of `WINDOW_REQUESTS` requests, by arrival, that were far below.

    Consecutive windows are one spell. `excused_s` counts from the last visible rise of the load that is no older than
    `excused_s`, or from the end of the first window: before it, no planner could know. A rise within a spell excuses the time
    after it anew.
    """
    ordered = sorted(served, key=lambda one: one.arrived_s)
    worst, overdue_s, since_s = 1.0, 0.0, math.inf
    for first in range(0, len(ordered) - WINDOW_REQUESTS + 1, WINDOW_REQUESTS):
        window = ordered[first : first + WINDOW_REQUESTS]
        share = sum(one.attained for one in window) / WINDOW_REQUESTS
        worst = min(worst, share)
        if share >= asked - FAR_BELOW_ASKED:
            since_s = math.inf
            continue
        begin_s, end_s = window[0].arrived_s, window[-1].arrived_s
        if since_s == math.inf:
            since_s = max((rise_s for rise_s in rises_s if begin_s - excused_s < rise_s <= begin_s), default=end_s)
        for rise_s in sorted(one for one in rises_s if since_s < one <= end_s):
            overdue_s = max(overdue_s, rise_s - since_s - excused_s)
            since_s = rise_s
        overdue_s = max(overdue_s, end_s - since_s - excused_s)
    return Below(worst, overdue_s)


def compared(worker_s: float, attainment: float, other: Split) -> str:
    """State the cost of the planner and of a static split, and the share that each attains."""
    said = f"the planner takes {worker_s / other.worker_s:.1%} of the worker-hours of {other.prefill} + {other.decode} workers"
    return f"{said}; it attains {attainment:.2%}, they {other.attainment:.2%}"


@dataclass(frozen=True, slots=True)
class Reference:
    """The runs of a load that do not involve the planner."""

    splits: tuple[Split, ...]
    """All static splits that could be the cheapest split for the wanted share."""
    oracle: Oracle | None


@dataclass(frozen=True, slots=True)
class Judged:
    """A load's runs: the planner's, the best static splits, and the oracle's."""

    load: Load
    requests: int
    attainment: float
    worker_s: float
    below: Below
    same: Split | None
    """The cheapest split that attains what was asked for, or what the planner attained where that is less."""
    asked: Split | None
    """The cheapest split that attains what was asked for."""
    oracle: Oracle | None

    @property
    def losses(self) -> list[str]:
        """The failures of the planner in words. Only these count against it."""
        said, wanted = [], self.load.targets.attainment
        if self.attainment < wanted - SHORT_OF_ASKED:
            beside = "" if self.asked in (None, self.same) else f": {compared(self.worker_s, self.attainment, self.asked)}"
            said.append(f"it attains {self.attainment:.1%} where {wanted:.0%} were asked for{beside}")
        if self.below.overdue_s > 0.0:
            least = wanted - FAR_BELOW_ASKED
            said.append(f"it stays below {least:.0%} for {self.below.overdue_s:.0f} s longer than a start excuses")
        if self.same is None:
            return said
        spent = self.worker_s / self.same.worker_s
        possible = self.oracle is not None and self.oracle.worker_s <= ENOUGH_SAVED * self.same.worker_s
        if spent > 1.0 or (spent > ENOUGH_SAVED and possible):
            said.append(compared(self.worker_s, self.attainment, self.same))
        return said


def reference_of(load: Load, day: Day) -> Reference:
    """Run a load under all static splits that count, and under the schedules of the oracle's search. Raises `ConfigError` for a
    day so short that no request arrives."""
    requests, wanted = _requests(load, day), load.targets.attainment
    found = search(_splits(load, requests), load.limits.prefill.max_workers, load.limits.decode.max_workers, (wanted,))

    def scheduled(schedule: Sequence[PoolSizes]) -> tuple[SimReport, ElasticReport]:
        controller = ScheduleController(schedule, interval_s, load.start_s)
        return _run(load, requests, controller, controller.at(0.0))

    interval_s = day.length_s / INTERVALS
    first = [_first(load, day, n * interval_s, interval_s) for n in range(INTERVALS)]
    oracle, asked = find(scheduled, first, interval_s, load.limits, wanted), best_of(found, wanted)
    if asked is not None and (oracle is None or asked.worker_s < oracle.worker_s):  # the split is a schedule too
        oracle = Oracle((PoolSizes(asked.prefill, asked.decode),), asked.attainment, asked.worker_s)
    return Reference(tuple(found), oracle)


def judge(load: Load, day: Day, reference: Reference | None = None, settings: PlannerSettings | None = None) -> Judged:
    """Run a load under the planner, and compare it with a reference, which is found first if there is none.

    The planner begins with the sizes of the static split that attains the wanted share: the sizes of a capacity plan, not of a
    first day. Raises `ConfigError` for a day so short that no request arrives.
    """
    requests, wanted = _requests(load, day), load.targets.attainment
    reference = reference or reference_of(load, day)
    asked = best_of(reference.splits, wanted)
    begin = load.sizes_at(0.0, day) if asked is None else PoolSizes(asked.prefill, asked.decode)
    planner = PlannerController(load.targets, load.limits, settings or PlannerSettings(start_s=load.start_s))
    report, pools = _run(load, requests, planner, begin)
    attainment = sum(one.attained for one in report.served) / len(requests)
    found_below = below(report.served, wanted, load.rises_s(day), load.start_s + 2.0 * INTERVAL_S)
    same = asked
    if attainment < wanted:
        most = load.limits.prefill.max_workers, load.limits.decode.max_workers
        same = best_of(search(_splits(load, requests), *most, (attainment,)), attainment)
    return Judged(load, len(requests), attainment, pools.worker_s, found_below, same, asked, reference.oracle)


def _requests(load: Load, day: Day) -> list[TraceRequest]:
    requests = load.requests(day)
    if not requests:
        raise ConfigError(f"{load.name} has no request within {day.length_s:g} s: take a longer day")
    return requests


def _splits(load: Load, requests: Sequence[TraceRequest]) -> Callable[[Sequence[tuple[int, int]], float], Sequence[Split]]:
    """Return what runs some splits."""
    return lambda ways, enough: [run_split(load.spec, *way, requests, enough) for way in ways]


def _run(
    load: Load, requests: Sequence[TraceRequest], controller: Controller, begin: PoolSizes
) -> tuple[SimReport, ElasticReport]:
    spec = load.spec
    spec = replace(spec, prefill=[spec.prefill[0]] * begin.prefill, decode=[spec.decode[0]] * begin.decode)
    elasticity = Elasticity(load.limits, interval_s=INTERVAL_S, start_s=load.start_s, slo_class=load.classes[0].slo.name)
    cluster = ElasticCluster(spec, requests, controller, elasticity)
    return run_cluster(cluster), cluster.pools


def _first(load: Load, day: Day, begin_s: float, interval_s: float) -> PoolSizes:
    """Return the most workers that the load keeps busy all the time at ten moments of an interval."""
    sizes = [load.sizes_at(begin_s + part * interval_s / 10.0, day) for part in range(10)]
    return PoolSizes(max(1, *(one.prefill - 1 for one in sizes)), max(1, *(one.decode - 1 for one in sizes)))
