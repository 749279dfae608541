"""The measurement of a rate on a live cluster: the load generator, a test that ends the run, and the workers' counters."""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from pdserve.core.errors import PdserveError
from pdserve_bench.layout import Layout
from pdserve_bench.load.generator import Encode, run_load
from pdserve_bench.load.grpc_target import GrpcTarget
from pdserve_bench.load.schedule import RunLimits
from pdserve_bench.load.target import RequestOptions, Target
from pdserve_bench.row import BenchRow
from pdserve_bench.search.goodput import GoodputSearch, RunAction, StopAction
from pdserve_bench.search.reshape import CannotShape
from pdserve_bench.search.result import Point, figures_of
from pdserve_bench.search.settings import SearchSettings
from pdserve_bench.search.shaper import LiveCluster, Shaper
from pdserve_bench.search.trial import Decision, Judge, Trial
from pdserve_bench.workload.request import Arrivals
from pdserve_bench.workload.workload import Workload

DRAIN_S: Final = 60.0
"""The longest time that the last requests of a run may take, and in which a cluster becomes idle after it."""
_REQUEST_TIMEOUT_S: Final = 600.0


@dataclass(slots=True)
class LiveMeasure:
    """It measures rates of one workload on the cluster as it is shaped."""

    settings: SearchSettings
    workload: Workload
    arrivals: Arrivals
    target: GrpcTarget
    cluster: LiveCluster
    seed: int
    refusal: Callable[[Sequence[BenchRow]], str]
    """It says why rows do not count, as `pdserve_bench.load.watch.refusal` does."""
    observe: Callable[[Trial, BenchRow], object] = lambda trial, row: None
    """A view sees each row, and the trial after it."""
    encode: Encode | None = None
    placement: str = "disaggregated"
    """The placement that requests ask for where the layout has prefill workers. Elsewhere they ask for `colocated`."""
    salt: str = field(default_factory=lambda: secrets.token_hex(8))
    """Each run has a cache salt of its own, which begins so: no prompt of an earlier run is in the prefix cache."""
    clock: Callable[[], float] = time.perf_counter
    poll_s: float = 0.001

    async def measure(self, run: RunAction, number: int, repeat: int) -> Point:
        """Run one rate and return its point.

        The points of a layout have lengths and gaps of their own, drawn from the seed and `repeat`. All layouts get the same
        ones. The tokens differ at each point of the search.
        """
        limits = self.settings.trial(run.rate_per_s, run.min_yes_s, run.max_s)
        trial = Trial(limits)
        before = await self.cluster.counters()
        began_s = self.clock()
        rows = await self._rows(run, Judge(trial, self.settings.slo), number, repeat)
        took_s = self.clock() - began_s
        seen = trial.close(took_s)
        after = await self.cluster.counters()
        await self.cluster.wait_idle(DRAIN_S)
        return Point(
            layout=run.layout,
            rate_per_s=run.rate_per_s,
            requests=seen.requests,
            attained=seen.attained,
            low=seen.low,
            high=seen.high,
            measured_s=took_s,
            figures=figures_of(rows, self.settings.slo, before, after),
            refused=self.refusal(rows),
            overloaded=trial.decision is Decision.OVERLOADED,
        )

    async def _rows(self, run: RunAction, judge: Judge, number: int, repeat: int) -> list[BenchRow]:
        """Send the requests until the trial has decided or the time is over, and return the rows of all of them."""
        rows: list[BenchRow] = []

        def watch(row: BenchRow) -> bool:
            rows.append(row)
            decided = judge.watch(row)
            self.observe(judge.trial, row)
            return decided

        limits = judge.trial.settings
        requests = self.workload.requests(self.arrivals.with_rate(run.rate_per_s), self.seed + repeat, 1 + number)
        bounds = RunLimits(
            duration_s=limits.max_s - limits.warm_s, warmup_s=limits.warm_s, request_timeout_s=_REQUEST_TIMEOUT_S
        )
        target = self._target(1 + number, self.placement if run.layout.disaggregated else "colocated")
        load = run_load(
            judge.requests(requests), target, bounds, watch, encode=self.encode, clock=self.clock, poll_s=self.poll_s
        )
        drain_s = min(DRAIN_S, self.settings.warm_s + 1.0)
        try:
            async with asyncio.timeout(run.max_s + drain_s):
                await load
        except TimeoutError:
            pass  # the last requests were cut off, and their rows say so
        return rows

    def _target(self, number: int, placement: str) -> Target:
        return self.target.with_options(RequestOptions(cache_salt=f"{self.salt}-{number}", placement=placement))

    async def probe(self, concurrency: int, duration_s: float) -> float:
        """Return the rate at which the cluster answers when so many requests run at all times: a first guess of its goodput."""
        ends_s: list[float] = []

        def watch(row: BenchRow) -> bool:
            if row.ok:
                ends_s.append(row.ended_s)
            return False

        requests = self.workload.requests(Arrivals(kind="closed"), self.seed)
        bounds = RunLimits(duration_s=duration_s, max_concurrency=concurrency, request_timeout_s=_REQUEST_TIMEOUT_S)
        target = self._target(0, "auto")
        await run_load(requests, target, bounds, watch, encode=self.encode, clock=self.clock, poll_s=self.poll_s)
        await self.cluster.wait_idle(DRAIN_S)
        return len(ends_s) / max(ends_s) if ends_s else 0.0


# The loop that does what the search says: shape the cluster, measure a rate, keep the point.


_RESHAPE_S: Final = 5.0
"""The time of a change of the layout, before one was measured."""


class ClusterView(Protocol):
    """It shows what a search does."""

    def begins(self, run: RunAction, points: Sequence[Point], left_s: float) -> None:
        """Show that a run begins. `left_s` is what is left of the budget."""

    def ends(self, points: Sequence[Point]) -> None:
        """Show the points, of which the last one is new, and keep them."""


async def carry_out(
    search: GoodputSearch,
    measure: LiveMeasure,
    shaper: Shaper,
    view: ClusterView,
    *,
    points: Sequence[Point] = (),
    budget_s: float = math.inf,
    clock: Callable[[], float],
    fits: Callable[[Layout], bool] = lambda _: True,
    restore: bool = True,
) -> tuple[list[Point], StopAction | Layout]:
    """Search until nothing is left to do or the budget is used up, and return all points and why it ended.

    fits: tells whether this cluster can be brought to a layout. The first wanted layout that does not fit ends the search here,
    and is returned: another cluster goes on with the points.

    Every new point is shown to the view at once, so whoever ends the search loses one running point at most. The first layout
    of the cluster is brought back on every path, unless `restore` is False: nobody uses the cluster afterwards. An error that
    says why the search ended is kept when that fails as well.
    """
    found = list(points)
    began_s = clock()
    shaped: Layout | None = None
    reshape_s = _RESHAPE_S
    try:
        while True:
            left_s = budget_s - (clock() - began_s) - reshape_s  # the last change brings the first layout back
            action = search.next(found, left_s, reshape_s, shaped)
            if isinstance(action, StopAction):
                return found, action
            if not fits(action.layout):
                return found, action.layout
            view.begins(action, found, left_s)
            if action.layout != shaped:
                at_s = clock()
                await shaper.shape(action.layout)
                shaped, reshape_s = action.layout, max(reshape_s, clock() - at_s)
            point = await measure.measure(action, len(found), sum(one.layout == action.layout for one in found))
            await shaper.check(action.layout)
            found.append(point)
            view.ends(found)
    finally:
        first = sys.exception()
        try:
            if restore:
                await shaper.restore()
        except PdserveError as exc:
            if isinstance(first, PdserveError):
                raise CannotShape(f"{first.message}. And then the first layout did not come back: {exc.message}") from first
            raise
