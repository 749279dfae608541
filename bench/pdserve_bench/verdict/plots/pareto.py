"""TTFT against TPOT of all measured points, with the targets as a box."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_bench.search.result import Point
from pdserve_bench.verdict.plots.chart import Material, below, colour, log_limits, log_ticks, marker
from pdserve_bench.verdict.plots.theme import Theme
from pdserve_bench.verdict.points import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_pareto(panels: list[Axes], material: Material, theme: Theme) -> None:
    """Draw the p99 of both times, one marker for each point, and the front: no other point of its kind is better in both."""
    axes, slo = panels[0], material.result.slo
    points = [one for one in counted(material.result) if one.figures.ttft_p99_s > 0 and one.figures.tpot_p99_s > 0]
    for disaggregated, name in ((True, "two pools"), (False, "colocated")):
        own = [one for one in points if one.layout.disaggregated is disaggregated]
        if not own:
            continue
        ink = colour(own[0].layout, theme)
        axes.plot(*_ms(own), marker(own[0].layout), color=ink, markersize=5, alpha=0.75, label=f"{name}: points")
        edge = front(own)
        if len(edge) > 1:
            axes.step(*_ms(edge), where="post", color=ink, linewidth=1.3, label=f"{name}: front")
    limits = [None if one is None else 1e3 * one for one in (slo.ttft_s, slo.tpot_s)]
    x, y = _ms(points)
    left, right = log_limits(x if limits[0] is None else [*x, limits[0]])
    bottom, top = log_limits(y if limits[1] is None else [*y, limits[1]])
    axes.fill_between(
        [left, limits[0] or right], bottom, limits[1] or top, color=theme.good, alpha=0.12, linewidth=0,
        label="within both targets at p99",
    )  # fmt: skip
    log_ticks(axes, "x", left, right)
    log_ticks(axes, "y", bottom, top)
    axes.set(xlabel="p99 TTFT, ms", ylabel="p99 TPOT, ms", title="TTFT against TPOT")
    axes.grid(True, linewidth=0.6)
    below(axes)


def front(points: list[Point]) -> list[Point]:
    """Return the points than which no other one has both a lower TTFT and a lower TPOT, by their TTFT."""
    best: list[Point] = []
    for one in sorted(points, key=lambda one: (one.figures.ttft_p99_s, one.figures.tpot_p99_s)):
        if not best or one.figures.tpot_p99_s < best[-1].figures.tpot_p99_s:
            best.append(one)
    return best


def _ms(points: list[Point]) -> tuple[list[float], list[float]]:
    return [1e3 * one.figures.ttft_p99_s for one in points], [1e3 * one.figures.tpot_p99_s for one in points]
