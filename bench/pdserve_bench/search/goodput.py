"""The search for goodput over rates and layouts: from the points so far to the next thing to do. Pure.

Its whole state is the list of points, so a search goes on from its file as if nothing had happened.
`docs/design/0045-search.md` says why these points, and what was rejected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pdserve_bench.layout import Layout
from pdserve_bench.search.actions import Action, RunAction, StopAction
from pdserve_bench.search.curve import next_rate
from pdserve_bench.search.race import TestFamily, families
from pdserve_bench.search.result import LayoutResult, Point
from pdserve_bench.search.settings import SearchSettings

MAX_REFUSED: Final = 3
"""A rate that the generator could not keep up with so many times is out of its reach."""
_COARSE: Final = 0.25
"""The resolution of points that only bracket the goodput."""
_RACE_STEP: Final = 1.1
"""The first step of a layout whose goodput is known roughly, from another one."""
_SHARE: Final = 2 / 3
"""The most of the budget that one family may use while the other one is open: on a machine that changes, the baseline alone
used all 25 minutes."""


class GoodputSearch:
    """The decisions of one search."""

    def __init__(self, settings: SearchSettings) -> None:
        """Prepare a search."""
        self.settings = settings

    def next(
        self,
        points: Sequence[Point],
        remaining_s: float = math.inf,
        reshape_s: float = 0.0,
        shaped: Layout | None = None,
    ) -> Action:
        """Return what to do next.

        `remaining_s` is what is left of the budget, `reshape_s` what a change of the layout costs, and `shaped` the layout that
        the cluster has. None: it is unknown.
        """
        groups = families(self.settings, points)
        action = self._wanted(self._in_turn(groups, points, remaining_s), points)
        if isinstance(action, StopAction):
            return action
        left_s = remaining_s - (reshape_s if action.layout != shaped else 0.0)
        settled = all(group.points and group.settled(group.leader) for group in groups)
        needed_s = self._least_s(settled)
        if left_s < needed_s:
            return StopAction(
                False,
                f"the budget is used up: {max(0.0, remaining_s):.0f} s are left, and one more point needs {needed_s:.0f} s",
            )
        return replace(action, max_s=min(self.settings.max_point_s, left_s))

    def results(self, points: Sequence[Point]) -> tuple[LayoutResult, ...]:
        """Return the goodput of each layout that was measured, the best one first."""
        found = []
        for group in families(self.settings, points):
            for layout in group.points:
                curve = group.curve(layout)
                leads = layout == group.leader
                closed = not leads and group.settled(group.leader) and group.open_rate(layout) is None
                narrow = curve.settled(self.settings.reachable_tolerance, self.settings.floor_per_s)
                done = (narrow and group.settled(layout)) or closed
                goodput = curve.goodput_per_s()
                found.append(LayoutResult(layout, goodput, curve.low_per_s, curve.high_per_s, done))
        return tuple(sorted(found, key=lambda one: (-one.goodput_per_s, one.layout.max_num_seqs)))

    def knees(self, points: Sequence[Point]) -> dict[str, int]:
        """Return the smallest `max_num_seqs` that does not cost goodput, by the name of the best split of each family.

        A family that keeps the target at no rate has none.
        """
        groups = families(self.settings, points)
        return {group.leader.name: group.knee for group in groups if group.curve(group.leader).low_per_s}

    def _least_s(self, settled: bool) -> float:
        """Return the time without which no point is begun. A race may find a new leader, which must be settled as well."""
        settings = self.settings
        one_s = min(settings.max_point_s, settings.warm_s + 5.0)
        return one_s + (settings.max_point_s if settled else 0.0)

    @staticmethod
    def _in_turn(groups: Sequence[TestFamily], points: Sequence[Point], remaining_s: float) -> list[TestFamily]:
        """Return the families, those last that have used their share of the budget."""
        share_s = (sum(point.measured_s for point in points) + remaining_s) * _SHARE

        def used_up(group: TestFamily) -> bool:
            of_group = (point.measured_s for point in points if point.layout.disaggregated is group.disaggregated)
            return sum(of_group) >= share_s

        return sorted(groups, key=used_up)

    def _wanted(self, groups: Sequence[TestFamily], points: Sequence[Point]) -> RunAction | StopAction:
        """Return the next point, were there no end of time."""
        for group in groups:
            run = self._settle(group, group.leader, groups, points)
            if run is not None:
                return run
        for group in reversed(groups):
            for challenger in group.challengers():
                rate = group.open_rate(challenger)
                if rate is None or self._cap(points, challenger) <= rate < math.inf:
                    continue
                if math.isfinite(rate):
                    return self._run(challenger, rate)
                run = self._settle(group, challenger, groups, points)
                if run is not None:
                    return run
        caps = [self._cap(points, group.leader) for group in groups if not group.settled(group.leader)]
        if caps and min(caps) == math.inf:
            return StopAction(
                False,
                f"runs of {self.settings.max_point_s:.0f} s are too short to decide rates below "
                f"{self.settings.decidable_per_s:.3g} requests a second: give a larger --max-point-s or --budget-minutes",
            )
        if caps:
            return StopAction(
                False,
                f"the generator cannot send {min(caps):.3g} requests a second, which the cluster may serve: "
                "run it on a machine, or on cores, that the workers do not use",
            )
        return StopAction(True, "every layout is settled, or can no longer be the best one")

    def _settle(
        self, group: TestFamily, layout: Layout, groups: Sequence[TestFamily], points: Sequence[Point]
    ) -> RunAction | None:
        """Return the next point that settles a layout. None: it is settled, or the generator can offer no more."""
        if group.settled(layout) and group.points:
            return None
        settings, curve, cap = self.settings, group.curve(layout), self._cap(points, layout)
        if curve.settled(settings.reachable_tolerance, settings.floor_per_s):
            return self._run(layout, curve.low_per_s)
        known = max((other.curve(other.leader).low_per_s for other in groups if other is not group), default=0.0)
        known = known or (group.curve(group.leader).low_per_s if layout != group.leader else 0.0)
        rate = next_rate(curve, known or settings.first_rate_per_s, _RACE_STEP if known else 2.0, settings, cap)
        too_low = curve.low_per_s == 0.0 and bool(curve.rates) and rate < settings.decidable_per_s
        if rate >= cap or too_low or (rate in curve.rates and curve.low_per_s == 0.0):
            return None
        return self._run(layout, rate, coarse=not curve.bracketed())

    def _run(self, layout: Layout, rate_per_s: float, *, coarse: bool = False) -> RunAction:
        """Return a run of one rate. A coarse one only brackets: the low end is measured again before it counts."""
        settings = self.settings
        resolution = _COARSE if coarse else settings.tolerance
        return RunAction(layout, rate_per_s, settings.min_yes_s(resolution), settings.max_point_s)

    @staticmethod
    def _cap(points: Sequence[Point], layout: Layout) -> float:
        """Return the lowest rate that the generator could not offer. Infinite: it kept up with all of them."""
        refused = [point.rate_per_s for point in points if point.refused and point.layout == layout]
        return min((rate for rate in refused if refused.count(rate) >= MAX_REFUSED), default=math.inf)
