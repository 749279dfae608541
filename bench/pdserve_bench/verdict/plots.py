"""The charts of a verdict, drawn by matplotlib, as SVG for a page or in one picture."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pdserve_bench.layout import Layout
from pdserve_bench.row import BenchRow
from pdserve_bench.search.result import GoodputResult, Point
from pdserve_bench.verdict.data import CandidateData, VerdictData
from pdserve_bench.verdict.points import SAME_RATE, at_same_rate, counted, nearest, of_layout
from pdserve_bench.verdict.units import number, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure


# Colours and type of the charts. The colours can be told apart without seeing red and green (Okabe and Ito 2008).


@dataclass(frozen=True, slots=True)
class Theme:
    """The colours of all charts, by what they stand for."""

    surface: str
    ink: str
    muted: str
    grid: str
    apart: str
    together: str
    good: str
    queue: str

    def rc(self) -> dict[str, Any]:
        """Return the settings of matplotlib. Texts are never read as formulas: some come from files of others."""
        return {
            "text.parse_math": False,
            "axes.facecolor": self.surface,
            "axes.edgecolor": self.muted,
            "axes.labelcolor": self.ink,
            "axes.titlecolor": self.ink,
            "axes.titlelocation": "left",
            "axes.titlesize": 11,
            "axes.titleweight": "bold",
            "axes.labelsize": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "figure.facecolor": self.surface,
            "font.family": "DejaVu Sans",
            "font.size": 9,
            "grid.color": self.grid,
            "legend.frameon": False,
            "legend.fontsize": 8.5,
            "legend.labelcolor": self.ink,
            "savefig.facecolor": self.surface,
            "svg.fonttype": "path",
            "svg.hashsalt": "pdserve",
            "text.color": self.ink,
            "xtick.color": self.muted,
            "ytick.color": self.muted,
            "xtick.labelcolor": self.ink,
            "ytick.labelcolor": self.ink,
            "xtick.labelsize": 8.5,
            "ytick.labelsize": 8.5,
        }


LIGHT: Final = Theme("#ffffff", "#1f2328", "#656d76", "#d8dee4", "#0072b2", "#d55e00", "#009e73", "#8c6bb1")
DARK: Final = Theme("#0d1117", "#e6edf3", "#9198a1", "#30363d", "#56b4e9", "#e69f00", "#2bd4a4", "#b79bd9")
MARKED: Final = Theme("#fefefa", "#010203", "#010204", "#010205", "#010206", "#010207", "#010208", "#010209")
"""Colours that stand for names. A page replaces each by a variable of CSS, so that one drawing serves light and dark pages."""


# The material of all charts, their axes, and the labels of layouts.


WIDE_IN: Final = 12.6
"""The width of a chart that takes the whole page."""
FEW_DECADES: Final = 2.6
MOST_ROWS: Final = 12
"""The most layouts of a chart with one row for each."""


@dataclass(frozen=True, slots=True)
class Material:
    """All that charts draw. runs: the rows of runs, by their names, for the tail of the ITL and for one request."""

    verdict: VerdictData
    result: GoodputResult
    runs: dict[str, tuple[BenchRow, ...]] = field(default_factory=dict)


Draw: TypeAlias = Callable[["list[Axes]", Material, Theme], None]


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: how it is drawn, its size in inches, and what it shows in words for those who do not see it."""

    name: str
    alt: str
    draw: Draw
    width: float = 6.2
    height: float = 4.2
    panels: int = 1

    @property
    def wide(self) -> bool:
        """The chart takes the whole width of the page."""
        return self.width >= WIDE_IN


def label(one: CandidateData) -> str:
    """Return the name of a layout with its limits."""
    return f"{one.name}, chunk {one.layout.chunk_tokens}, {one.layout.max_num_seqs} seqs"


def known(text: str) -> str:
    """Return a text of others with question marks for the characters that the font of the charts may lack."""
    return "".join(char if char.isprintable() else "?" for char in text.encode("latin-1", "replace").decode("latin-1"))


def colour(layout: Layout, theme: Theme) -> str:
    """Return the colour of a kind of layout."""
    return theme.apart if layout.disaggregated else theme.together


def marker(layout: Layout) -> str:
    """Return the marker of a kind of layout, which tells it without its colour."""
    return "o" if layout.disaggregated else "s"


def shown(verdict: VerdictData) -> list[CandidateData]:
    """Return the layouts that have a row, the best first. The best of both kinds are always among them."""
    keep = [one for one in (verdict.apart, verdict.together) if one is not None]
    rest = [one for one in verdict.candidates if one not in keep]
    chosen = [*keep, *rest[: MOST_ROWS - len(keep)]]
    return [one for one in verdict.candidates if one in chosen]


def below(axes: Axes, columns: int = 2) -> None:
    """Put the legend below the axes, where it never covers data."""
    axes.legend(loc="upper left", bbox_to_anchor=(-0.02, -0.17), ncols=columns, borderaxespad=0, handlelength=1.8)


def wide_range(values: list[float]) -> bool:
    """Tell whether positive values need a logarithmic axis."""
    positive = [one for one in values if one > 0]
    return bool(positive) and max(positive) > 20 * min(positive)


def log_ticks(axes: Axes, name: str, low: float, high: float) -> None:
    """Make an axis ("x" or "y") logarithmic, with few labels in a long range, and some in a short one too."""
    from matplotlib.ticker import LogLocator, NullLocator

    decades = math.log10(high / low)
    getattr(axes, f"set_{name}scale")("log")
    getattr(axes, f"set_{name}lim")(low, high)
    axis = getattr(axes, f"{name}axis")
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if decades < FEW_DECADES else (1.0,), numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: short(value))


def short(value: float) -> str:
    """Write a number at an axis."""
    return f"{value:,.10g}" if 1e-3 <= abs(value) < 1e5 or not value else f"{value:.3g}"


def log_limits(values: list[float]) -> tuple[float, float]:
    """Return limits around positive values, at least a factor of 4 apart. No value gives 1 to 10."""
    if not values:
        return 1.0, 10.0
    low, high = min(values) / 1.25, max(values) * 1.25
    return (low, high) if high > 4 * low else (low / 2, high * 2)


# Attainment against the rate of arrivals, with the goodput of the best layouts of both kinds.


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


# TTFT against TPOT of all measured points, with the targets as a box.


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


# All layouts: the goodput of each, and their attainments at one rate.


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


# The tail of the ITL: the share of the gaps that are longer than a time.


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


# One request as a waterfall: its phases one below the other, by the time since it was sent.


@dataclass(frozen=True, slots=True)
class BarPhase:
    """One bar: from `begin_s` to `end_s` since the request was sent. hidden: nothing waits for it."""

    name: str
    begin_s: float
    end_s: float
    hidden: bool = False


def typical(rows: Sequence[BenchRow]) -> BenchRow | None:
    """Return the answered request of median length of time that says most about itself. None: none was answered."""
    answered = [row for row in rows if row.ok and not row.warm_up and len(row.arrivals) > 1]
    told = [row for row in answered if row.served.queue_s is not None and row.served.prefill_s is not None]
    moved = [row for row in told if row.served.transfer_s]
    found = sorted(moved or told or answered, key=lambda row: row.e2e_s)
    return found[len(found) // 2] if found else None


def phases(row: BenchRow) -> list[BarPhase]:
    """Return the phases of a request. What the server did not say is one phase until the first token.

    The transfer ends when its exposed part ends, which begins with the first token. The hidden part lies before.
    """
    first_s = row.ttft_s
    assert first_s is not None
    served = row.served
    found = []
    if served.queue_s is None or served.prefill_s is None:
        found.append(BarPhase("until the first token", 0.0, first_s))
    else:
        end = min(first_s, served.queue_s)
        found.append(BarPhase("queue", 0.0, end))
        found.append(BarPhase("prefill", max(end, first_s - served.prefill_s), first_s))
    exposed_s = served.exposed_transfer_s or 0.0
    if served.transfer_s:
        hidden_s = max(0.0, served.transfer_s - exposed_s)
        if hidden_s:
            found.append(BarPhase("transfer, hidden", max(0.0, first_s - hidden_s), first_s, hidden=True))
        if exposed_s:
            found.append(BarPhase("transfer, exposed", first_s, first_s + exposed_s))
    last_s = row.arrivals[-1][0] - row.sent_s
    begin = min(first_s + exposed_s, last_s)
    found.append(BarPhase("decode", begin, last_s))
    return found


def draw_waterfall(panels: list[Axes], material: Material, theme: Theme) -> None:
    """Draw the typical request of the first run that has one."""
    axes = panels[0]
    row = next(row for rows in material.runs.values() if (row := typical(rows)) is not None)
    bars = phases(row)
    inks = {"queue": theme.queue, "prefill": theme.together, "decode": theme.apart, "until the first token": theme.together}
    end = max(one.end_s for one in bars)
    for place, one in enumerate(bars):
        ink = inks.get(one.name, theme.good)
        width = max(one.end_s - one.begin_s, end / 500)
        axes.barh(place, 1e3 * width, left=1e3 * one.begin_s, height=0.6, color=ink, alpha=0.45 if one.hidden else 0.9)
    tokens = [1e3 * (time - row.sent_s) for time, _ in row.arrivals]
    axes.plot(tokens, [len(bars) - 1] * len(tokens), "|", color=theme.ink, markersize=9, markeredgewidth=0.8)
    names = [f"{one.name}  {seconds(one.end_s - one.begin_s)}" for one in bars]
    axes.set_yticks(range(len(bars)), names)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set(xlabel="ms since the request was sent; a stroke is a message with tokens", title="One typical request")
    axes.set_xlim(0, 1e3 * end * 1.02)
    axes.tick_params(axis="y", length=0)
    axes.grid(True, axis="x", linewidth=0.6)


# The charts that a verdict has, and their drawing as SVG or into one picture.


NAMED: Final = {getattr(MARKED, name): f"var(--{name})" for name in Theme.__slots__}


def charts(material: Material) -> list[Chart]:
    """Return the charts for which there is something to draw. An odd one out takes the whole width."""
    found = []
    if counted(material.result):
        found.append(Chart("rates", "Share of the requests within both targets by rate, for the best layouts", draw_rates))
        found.append(Chart("pareto", "p99 TTFT against p99 TPOT of all measured points", draw_pareto))
    if material.verdict.candidates:
        rows = len(shown(material.verdict))
        alt = "Goodput of each layout with its interval, and attainment of each at one rate"
        found.append(Chart("layouts", alt, draw_layouts, WIDE_IN, 1.3 + 0.3 * max(3, rows), 2))
    if tails(material):
        found.append(Chart("tail", "Share of the gaps between tokens that are longer than a time", draw_tail))
    if any(typical(rows) is not None for rows in material.runs.values()):
        found.append(Chart("waterfall", "Phases of one request by time", draw_waterfall, 6.2, 3.0))
    narrow = [one for one in found if not one.wide]
    if len(narrow) % 2:
        found[found.index(narrow[0])] = replace(narrow[0], width=WIDE_IN)
    return found


def axes_of(figure: Figure | SubFigure, chart: Chart) -> list[Axes]:
    """Return new axes for the panels of a chart, side by side."""
    made = figure.subplots(1, chart.panels, squeeze=False)
    return list(made[0])


def styled(theme: Theme) -> AbstractContextManager[None]:
    """Let matplotlib draw in a theme, whatever the user's own settings are."""
    import matplotlib

    settings: dict[Any, Any] = {**matplotlib.rcParamsDefault, "backend": "agg", **theme.rc()}
    return matplotlib.rc_context(settings)


def svg(chart: Chart, material: Material) -> str:
    """Return a chart as an SVG element whose colours are variables of CSS. Its ids begin with the name of the chart."""
    from matplotlib.figure import Figure

    with styled(MARKED):
        figure = Figure(figsize=(chart.width, chart.height), layout="constrained")
        chart.draw(axes_of(figure, chart), material, MARKED)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return inline(buffer.getvalue(), chart)


def inline(text: str, chart: Chart) -> str:
    """Return a drawing as an element for a page: no declarations, no comments, no links to elsewhere, and ids of its own."""
    drawn = text[text.index(">", text.index("<svg")) + 1 :]
    drawn = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'(\bid="|url\(#)|xlink:(href="#)', rf"\1\2{chart.name}-", drawn)
    drawn = re.sub("|".join(NAMED), lambda colour: NAMED[colour[0]], drawn)
    view = re.search(r'viewBox="[^"]*"', text)
    assert view is not None
    return re.sub(r"\n\s*", "\n", f'<svg role="img" aria-label="{chart.alt}" {view[0]} version="1.1">{drawn}')


# The whole page as one PNG, drawn by matplotlib from the same sentences and charts.


WIDTH_IN: Final = 13.0
MARGIN_IN: Final = 0.3
LINE_IN: Final = 0.215
COLUMNS: Final = 165
"""Characters of a line of text at 10 points. The widest letters of the font still fit."""
DPI: Final = 100
PAD_IN: Final = 0.22
CARD_IN: Final = 1.05
CARDS: Final = 7


@dataclass(frozen=True, slots=True)
class PlotLine:
    """One line of text: its size in points, its weight and the name of its colour."""

    text: str
    size: float = 10.0
    bold: bool = False
    ink: str = "ink"


def png(material: Material, texts: dict[str, Any], theme: Theme) -> bytes:
    """Return the picture. texts: the content of the page."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    top, bottom = _head(texts), _foot(texts)
    rows = _rows(charts(material))
    cards = texts["cards"]
    heights = [
        _height(top),
        *([CARD_IN * -(-len(cards) // CARDS)] if cards else []),
        *(max(one.height for one in row) * WIDTH_IN / WIDE_IN for row in rows),
        _height(bottom),
    ]
    with styled(theme):
        figure = Figure(figsize=(WIDTH_IN, sum(heights)), layout=ConstrainedLayoutEngine(w_pad=PAD_IN, h_pad=0.06))
        parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])
        _write(parts[0], top, theme)
        if cards:
            _draw_cards(parts[1], cards, theme)
        for part, row in zip(parts[-1 - len(rows) : -1], rows, strict=True):
            for place, chart in zip(part.subfigures(1, 1 if row[0].wide else 2, squeeze=False)[0], row, strict=False):
                chart.draw(axes_of(place, chart), material, theme)
        _write(parts[-1], bottom, theme)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI, metadata={"Software": None})
    return buffer.getvalue()


def _rows(found: list[Chart]) -> list[list[Chart]]:
    """Put charts of half of the width side by side. A wide chart has a row of its own."""
    wide, narrow = [one for one in found if one.wide], [one for one in found if not one.wide]
    rows = [[one] for one in wide] + [narrow[at : at + 2] for at in range(0, len(narrow), 2)]
    return sorted(rows, key=lambda row: found.index(row[0]))


def _head(texts: dict[str, Any]) -> list[PlotLine]:
    lines = [PlotLine(texts["headline"], 19, True, texts["tone"]), *_wrapped(texts["trust"], ink="muted"), PlotLine("")]
    for one in texts["reasons"]:
        lines += _wrapped(one)
    return lines


def _foot(texts: dict[str, Any]) -> list[PlotLine]:
    sections = [
        ("The binding constraint", texts["constraint"]),
        ("Changes that alter the answer", texts["flips"]),
        ("How far to trust this", [f"{'! ' if serious else ''}{one}" for serious, one in texts["doubts"]]),
        ("Conditions", [texts["effort"], *(f"{name}: {value}" for name, value in texts["conditions"])]),
    ]
    lines: list[PlotLine] = []
    for title, sentences in sections:
        if sentences:
            lines += [PlotLine(""), PlotLine(title, 12, True)]
            for one in sentences:
                lines += _wrapped(one)
    return lines


def _wrapped(text: str, ink: str = "ink") -> list[PlotLine]:
    """Break a text into lines. Characters outside of the font's alphabet become question marks."""
    broken = textwrap.wrap(known(text), COLUMNS, break_long_words=True) or [""]
    return [PlotLine(one if at == 0 else f"    {one}", ink=ink) for at, one in enumerate(broken)]


def _line_in(line: PlotLine) -> float:
    return LINE_IN * max(1.0, line.size / 10.0) if line.text else LINE_IN / 2


def _height(lines: list[PlotLine]) -> float:
    return sum(map(_line_in, lines)) + 2 * MARGIN_IN


def _write(part: SubFigure, lines: list[PlotLine], theme: Theme) -> None:
    height = _height(lines)
    at = height - MARGIN_IN
    for line in lines:
        at -= _line_in(line)
        part.text(
            MARGIN_IN / WIDTH_IN,
            at / height,
            line.text,
            fontsize=line.size,
            fontweight="bold" if line.bold else "normal",
            color=getattr(theme, line.ink),
            va="bottom",
        )


def _draw_cards(part: SubFigure, cards: list[tuple[str, str, str]], theme: Theme) -> None:
    rows = -(-len(cards) // CARDS)
    for place, (name, value, note) in enumerate(cards):
        left = (MARGIN_IN + (WIDTH_IN - 2 * MARGIN_IN) * (place % CARDS) / CARDS) / WIDTH_IN
        top = 1 - (place // CARDS) / rows
        texts = (
            (name, 9, "normal", theme.muted, 0.12),
            (value, 15, "bold", theme.ink, 0.34),
            (note, 8, "normal", theme.muted, 0.72),
        )
        for text, size, weight, ink, down in texts:
            part.text(left, top - down / rows, text, fontsize=size, fontweight=weight, color=ink, va="top")
