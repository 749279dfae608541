"""Attainment against the rate of arrivals, with the goodput of the best layouts of both kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_bench.search.result import Point
from pdserve_bench.verdict.data import CandidateData
from pdserve_bench.verdict.plots.chart import Material, below, colour, label, log_limits, log_ticks, marker, wide_range
from pdserve_bench.verdict.plots.theme import Theme
from pdserve_bench.verdict.points import counted, of_layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_rates(panels: list[Axes], material: Material, theme: Theme) -> None:
    """Draw all points: attainment with its 95 % interval by rate."""
    axes, verdict, result = panels[0], material.verdict, material.result
    valid = counted(result)
    best = [one for one in (verdict.apart, verdict.together) if one is not None]
    rest = [one for one in valid if one.layout not in [side.layout for side in best]]
    if rest:
        axes.plot(*_xy(rest), ".", color=theme.muted, alpha=0.7, label="other layouts")
    refused = [one for one in result.points if one.refused and one.rate_per_s > 0]
    if refused:
        axes.plot(*_xy(refused), "x", color=theme.muted, label="points that do not count")
    for side in best:
        _draw_side(axes, side, of_layout(valid, side.layout), theme)
    axes.axhline(100 * result.attainment, color=theme.ink, linestyle="--", linewidth=1, label="target attainment")
    rates = [one.rate_per_s for one in (*valid, *refused)]
    if wide_range(rates):
        log_ticks(axes, "x", *log_limits([*rates, *(one.goodput.value for one in best if one.goodput.value)]))
    axes.set(ylim=(-4, 104), xlabel="requests/s", ylabel="requests within both targets, %", title="Attainment by rate")
    axes.grid(True, linewidth=0.6)
    below(axes)


def _xy(points: list[Point]) -> tuple[list[float], list[float]]:
    return [one.rate_per_s for one in points], [100 * one.attainment for one in points]


def _draw_side(axes: Axes, side: CandidateData, points: list[Point], theme: Theme) -> None:
    ink = colour(side.layout, theme)
    x, y = _xy(points)
    down = [max(0.0, 100 * (one.attainment - one.low)) for one in points]
    up = [max(0.0, 100 * (one.high - one.attainment)) for one in points]
    axes.errorbar(
        x,
        y,
        yerr=(down, up),
        fmt=f"-{marker(side.layout)}",
        color=ink,
        markersize=5,
        linewidth=1.6,
        capsize=2,
        label=label(side),
    )
    if side.goodput.value:
        top = side.goodput.high
        axes.axvspan(side.goodput.low, side.goodput.value if top is None else top, color=ink, alpha=0.16, linewidth=0)
        axes.axvline(side.goodput.value, color=ink, linewidth=1, linestyle=":")
