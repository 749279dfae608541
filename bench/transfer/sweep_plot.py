"""The drawing of a transfer sweep: rates on the left, CPU time on the right, both against the size of a block."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench.transfer.sweep_report import Sweep, name_of
from bench.transfer.ways import WAYS
from pdserve_bench.report.plot import LineColours, draw_both

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINES = (":", "-", "-", "--", "-", "-")
_MARKS = ("", "v", "o", "o", "s", "^")


def plot(path: Path, sweep: Sweep) -> None:
    """Draw the sweep for light pages, and into a second file for dark pages. It needs matplotlib."""
    draw_both(path, (11, 5), lambda figure, theme: _draw(figure, theme, sweep))


def _draw(figure: Figure, theme: LineColours, sweep: Sweep) -> None:
    cells = sweep.largest
    places = range(len(cells))
    green, purple = ("#4fd1a5", "#e58fd6") if theme.dark else ("#0f8a6a", "#a03a93")
    colours = (theme.grey, green, theme.blue, theme.blue, theme.orange, purple)
    rates, cpu = figure.subplots(1, 2)
    for way, colour, line, mark in zip(WAYS, colours, _LINES, _MARKS, strict=True):
        look = {"color": colour, "linestyle": line, "marker": mark, "linewidth": 1.8, "markersize": 5, "label": way}
        rates.plot(places, [cell.rate(way) / 1e9 for cell in cells], **look)
        cpu.plot(places, [sum(cell.cpu_s_per_gb(way)) for cell in cells], **look)
    rates.set(ylabel="GB/s", title="rate of a read")
    cpu.set(ylabel="CPU seconds for each GB, both processes", title="CPU time of a read")
    for axes in (rates, cpu):
        axes.set_yscale("log")
        axes.set_xticks(places, [f"{name_of(cell.block_bytes)}\nx {cell.count}" for cell in cells])
        axes.set_xlabel("size of a block, and blocks of the read")
        axes.grid(True, alpha=0.25, which="both")
    figure.legend(*cpu.get_legend_handles_labels(), loc="outside lower center", ncols=len(WAYS), frameon=False)
