"""The loop that does what the search says: shape the cluster, measure a rate, keep the point."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from pdserve.core.errors import PdserveError
from pdserve_bench.layout import Layout
from pdserve_bench.search.actions import RunAction, StopAction
from pdserve_bench.search.goodput import GoodputSearch
from pdserve_bench.search.reshape import CannotShape
from pdserve_bench.search.result import Point

_RESHAPE_S: Final = 5.0
"""The time of a change of the layout, before one was measured."""


class Measure(Protocol):
    """It measures one rate on the cluster as it is shaped."""

    async def measure(self, run: RunAction, number: int, repeat: int) -> Point:
        """Run one rate and return its point, with nothing left running.

        `number` counts the points of the search before it, and `repeat` those of the same layout.
        """


class ClusterShape(Protocol):
    """It brings a cluster to a layout. `pdserve_bench.search.shaper.Shaper` does it to a live one."""

    async def shape(self, layout: Layout) -> None:
        """Bring the cluster to the layout, and return when it is ready."""

    async def check(self, layout: Layout) -> None:
        """Raise `PdserveError` if the cluster no longer has the layout."""

    async def restore(self) -> None:
        """Bring back the layout that the cluster had first."""


class ClusterView(Protocol):
    """It shows what a search does."""

    def begins(self, run: RunAction, points: Sequence[Point], left_s: float) -> None:
        """Show that a run begins. `left_s` is what is left of the budget."""

    def ends(self, points: Sequence[Point]) -> None:
        """Show the points, of which the last one is new, and keep them."""


async def carry_out(
    search: GoodputSearch,
    measure: Measure,
    shaper: ClusterShape,
    view: ClusterView,
    *,
    points: Sequence[Point] = (),
    budget_s: float = math.inf,
    clock: Callable[[], float],
) -> tuple[list[Point], StopAction]:
    """Search until nothing is left to do or the budget is used up, and return all points and why it ended.

    Every new point is shown to the view at once, so whoever ends the search loses one running point at most. The first layout
    of the cluster is brought back on every path. An error that says why the search ended is kept when that fails as well.
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
            await shaper.restore()
        except PdserveError as exc:
            if isinstance(first, PdserveError):
                raise CannotShape(f"{first.message}. And then the first layout did not come back: {exc.message}") from first
            raise
