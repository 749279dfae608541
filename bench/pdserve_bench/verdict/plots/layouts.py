"""All layouts: the goodput of each, and their attainments at one rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve_bench.verdict.data import CandidateData
from pdserve_bench.verdict.plots.chart import Material, colour, label, marker, short, shown
from pdserve_bench.verdict.plots.theme import Theme
from pdserve_bench.verdict.points import SAME_RATE, counted, nearest, of_layout
from pdserve_bench.verdict.units import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_layouts(panels: list[Axes], material: Material, theme: Theme) -> None:
    """Draw one row for each layout. Both panels have the same rows."""
    left, right = panels
    rows = shown(material.verdict)
    for axes in panels:
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(True, axis="x", linewidth=0.6)
        axes.tick_params(axis="y", length=0)
    left.set_yticks(range(len(rows)), [label(one) for one in rows])
    right.set_yticks(range(len(rows)), [""] * len(rows))
    for place, one in enumerate(rows):
        _draw_goodput(left, place, one, theme)
    left.set(xlabel="requests/s", title="Goodput by layout (hollow: not settled)")
    ends = [one.goodput.value or 0.0 for one in rows] + [one.goodput.high for one in rows if one.goodput.high is not None]
    left.set_xlim(0, 1.05 * max(ends) or 1.0)
    left.xaxis.set_major_formatter(lambda value, _: short(value))
    _draw_attainment(right, rows, material, theme)


def _draw_goodput(axes: Axes, place: int, one: CandidateData, theme: Theme) -> None:
    ink = colour(one.layout, theme)
    value, low, high = one.goodput.value or 0.0, one.goodput.low, one.goodput.high
    axes.plot([low, value if high is None else high], [place, place], color=ink, linewidth=2.4, alpha=0.6)
    fill = "full" if one.settled else "none"
    axes.plot([value], [place], marker(one.layout), color=ink, fillstyle=fill, markersize=6, clip_on=False)
    if high is None:
        axes.plot([value], [place], ">", color=ink, markersize=9, fillstyle="none", clip_on=False)


def _draw_attainment(axes: Axes, rows: list[CandidateData], material: Material, theme: Theme) -> None:
    """Draw the attainments at the goodput of the recommended layout. A layout without a point near that rate has none."""
    verdict, valid = material.verdict, counted(material.result)
    rate = verdict.chosen.goodput.value if verdict.chosen else None
    rate = rate or next((one.rate_per_s for one in valid), 0.0)
    for place, one in enumerate(rows):
        point = nearest(of_layout(valid, one.layout), rate)
        if point is None or not rate / SAME_RATE <= point.rate_per_s <= rate * SAME_RATE:
            continue
        ink = colour(one.layout, theme)
        axes.plot([100 * point.low, 100 * point.high], [place, place], color=ink, linewidth=2.4, alpha=0.6)
        axes.plot([100 * point.attainment], [place], marker(one.layout), color=ink, markersize=6, clip_on=False)
    axes.axvline(100 * material.result.attainment, color=theme.ink, linestyle="--", linewidth=1)
    axes.set(xlim=(-3, 103), xlabel="requests within both targets, %", title=f"Attainment near {number(rate)} requests/s")
