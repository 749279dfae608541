"""The material of all charts, their axes, and the labels of layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeAlias

from pdserve_bench.layout import Layout
from pdserve_bench.row import BenchRow
from pdserve_bench.search.result import GoodputResult
from pdserve_bench.verdict.data import CandidateData, VerdictData
from pdserve_bench.verdict.plots.theme import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
