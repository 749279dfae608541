"""The tail of the ITL: the share of the gaps that are longer than a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Final, TypeAlias

from pdserve_bench.row import BenchRow
from pdserve_bench.search.result import Point
from pdserve_bench.verdict.plots.chart import Material, below, known, log_limits, log_ticks
from pdserve_bench.verdict.plots.theme import Theme
from pdserve_bench.verdict.points import at_same_rate, counted, of_layout
from pdserve_bench.verdict.units import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve: TypeAlias = tuple[list[float], list[float]]
MOST_CHARS: Final = 48
MOST_GAPS: Final = 2000
"""The points of a curve of measured gaps: more are not seen."""


def tails(material: Material) -> list[tuple[str, bool | None, Curve]]:
    """Return the curves: (name, disaggregated, times in ms and shares). disaggregated: None for a run's file."""
    found: list[tuple[str, bool | None, Curve]] = []
    for point in _pair(material):
        curve = of_histogram(point.figures.itl_histogram)
        if curve[0]:
            name = f"{point.layout.name} at {number(point.rate_per_s)} requests/s"
            found.append((name, point.layout.disaggregated, curve))
    for run, rows in material.runs.items():
        curve = of_rows(rows)
        if curve[0]:
            found.append((run, None, curve))
    return found


def _pair(material: Material) -> Sequence[Point]:
    """Return the points of both kinds at nearly the same rate, or all that there is."""
    verdict, valid = material.verdict, counted(material.result)
    sides = [of_layout(valid, one.layout) for one in (verdict.apart, verdict.together) if one is not None]
    rate = min((one.goodput.value or 0.0 for one in (verdict.apart, verdict.together) if one is not None), default=0.0)
    if len(sides) == 2 and (pair := at_same_rate(sides[0], sides[1], rate)) is not None:
        return pair
    return [side[0] for side in sides if side]


def of_histogram(histogram: Sequence[tuple[float, int]]) -> Curve:
    """Return the shares of the gaps above each bound that is finite and above 0, in ms."""
    total = sum(count for _, count in histogram)
    counts = accumulate(count for _, count in histogram)
    pairs = [
        (1e3 * bound, (total - count) / total)
        for (bound, _), count in zip(histogram, counts, strict=True)
        if total and 0 < bound < float("inf")
    ]
    return [time for time, _ in pairs], [share for _, share in pairs]


def of_rows(rows: Sequence[BenchRow]) -> Curve:
    """Return the shares of the gaps of all counted rows above each gap, in ms."""
    gaps = sorted(gap for row in rows if row.ok and not row.warm_up for gap in row.gaps_s if gap > 0)
    step = max(1, len(gaps) // MOST_GAPS)
    places = [*range(0, len(gaps), step), *range(max(0, len(gaps) - 200), len(gaps))] if step > 1 else list(range(len(gaps)))
    return [1e3 * gaps[place] for place in sorted(places)], [1 - (place + 1) / len(gaps) for place in sorted(places)]


def draw_tail(panels: list[Axes], material: Material, theme: Theme) -> None:
    """Draw the curves on logarithmic axes, where tails are seen. A share of 0 has no place there and ends a curve."""
    axes = panels[0]
    styles = iter(("-", "--", "-.", ":") * 8)
    for name, disaggregated, (times, shares) in tails(material):
        ink = theme.queue if disaggregated is None else theme.apart if disaggregated else theme.together
        seen = [(time, share) for time, share in zip(times, shares, strict=True) if share > 0]
        style = next(styles) if disaggregated is None else "-" if disaggregated else "--"
        axes.step(
            [one[0] for one in seen],
            [100 * one[1] for one in seen],
            style,
            where="post",
            color=ink,
            label=known(name)[:MOST_CHARS],
        )
    if material.result.slo.tpot_s is not None:
        axes.axvline(1e3 * material.result.slo.tpot_s, color=theme.ink, linestyle=":", linewidth=1, label="TPOT target")
    curves = [curve for _, _, curve in tails(material)]
    log_ticks(axes, "x", *log_limits([time for times, _ in curves for time in times]))
    log_ticks(axes, "y", min([100 * one for _, shares in curves for one in shares if one > 0], default=0.1) / 1.5, 130.0)
    axes.set(xlabel="gap between tokens, ms", ylabel="longer gaps, %", title="Tail of the ITL")
    axes.grid(True, linewidth=0.6)
    below(axes, columns=1)
