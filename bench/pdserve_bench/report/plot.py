"""Drawings of runs, each in two files: for light pages, and for dark ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from pdserve.core.errors import ConfigError
from pdserve_bench.report.summary import Columns, Floats, known

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class LineColours:
    """The colours of lines. `dark` tells the page."""

    dark: bool
    blue: str
    orange: str
    grey: str


THEMES: Final = (LineColours(False, "#1b66c9", "#c2410c", "#4b5563"), LineColours(True, "#7cb3ff", "#ff9e64", "#a9b1bd"))


def draw_both(
    path: Path, size_in: tuple[float, float], draw: Callable[[Figure, LineColours], object], dpi: int = 110
) -> tuple[Path, Path]:
    """Draw into a file for light pages, and into one with `-dark` in its name. Return both names.

    size_in: width and height in inches. Raises `ConfigError` for a name with an unknown ending, and when a file cannot be
    written.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    light, dark = (path.with_stem(f"{path.stem}-dark") if theme.dark else path for theme in THEMES)
    for theme, file in zip(THEMES, (light, dark), strict=True):
        with style.context("dark_background" if theme.dark else "default"):
            figure = Figure(figsize=size_in, layout="constrained")
            draw(figure, theme)
            try:
                figure.savefig(file, dpi=dpi)
            except (OSError, ValueError) as exc:
                raise ConfigError(f"--plot cannot write {file}: {exc}") from exc
    return light, dark


# The distributions of TTFT and ITL of one or two runs as a drawing, for light and for dark pages.


STYLES: Final = ("-", "--")
POINTS: Final = 2000
"""The most points of a line. More of them cannot be told apart in the drawing."""


def draw(path: Path, runs: Mapping[str, Columns]) -> tuple[Path, Path]:
    """Draw the runs by name into a file for light pages, and into one with `-dark` in its name. Returns both names.

    Raises `ConfigError` for a name with an unknown ending, and when a file cannot be written.
    """
    return draw_both(path, (10, 4), lambda figure, theme: _draw(figure, theme, runs))


def _draw(figure: Figure, theme: LineColours, runs: Mapping[str, Columns]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    for (name, run), colour, line in zip(runs.items(), (theme.blue, theme.orange), STYLES, strict=False):
        _line(left, known(run.ttft_s), name, colour, line)
        _line(right, run.gap_s, name, colour, line)
    left.set(title="time to first token", xlabel="TTFT in ms", ylabel="share of requests or gaps up to it")
    right.set(title="gaps between messages with tokens", xlabel="ITL in ms")
    for axes in (left, right):
        axes.set(ylim=(0, 1.01))
        axes.grid(True, alpha=0.25)
        if axes.lines:
            axes.set_xscale("log")
            axes.legend(loc="lower right")


def _line(axes: Axes, values: Floats, name: str, colour: str, line: str) -> None:
    """Draw the share of values up to each value. A time of 0, which a logarithmic axis has not, is drawn as 1 us."""
    if not values.size:
        return
    shares = np.linspace(0, 1, min(POINTS, max(2, values.size)))
    times_ms = 1000 * np.maximum(np.quantile(values, shares), 1e-6)
    axes.plot(times_ms, shares, color=colour, linestyle=line, label=name)
