"""The drawing of the roofline: prompts and decode steps beside what memory and products allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve_bench.report.plot import LineColours, draw_both

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Mark:
    """One step: operations a byte, and operations a second."""

    name: str
    intensity: float
    rate: float
    prefill: bool


def plot(path: Path, read_bytes_s: float, peak_s: float, marks: Sequence[Mark]) -> None:
    """Draw the roofline for light pages, and into a second file for dark ones. It needs matplotlib.

    read_bytes_s: memory bandwidth, bytes a second. peak_s: products, operations a second.
    """
    draw_both(path, (10, 5.5), lambda figure, theme: _draw(figure, theme, read_bytes_s, peak_s, marks), dpi=100)


def _draw(figure: Figure, theme: LineColours, read_bytes_s: float, peak_s: float, marks: Sequence[Mark]) -> None:
    from matplotlib.ticker import NullFormatter

    prefill, decode, grey = theme.blue, theme.orange, theme.grey
    axes = figure.subplots()
    ridge = peak_s / read_bytes_s
    left, right = min(mark.intensity for mark in marks) / 2, max(mark.intensity for mark in marks) * 4
    axes.plot([left, ridge, right], [left * read_bytes_s, peak_s, peak_s], color=grey, linewidth=1.8)
    axes.axvline(ridge, color=grey, linestyle=":", linewidth=1.2)
    notes = (
        (f"memory: {read_bytes_s / 1e9:.0f} GB/s", (left * 6, left * read_bytes_s * 6), (-10, 4), "right"),
        (f"products in bfloat16: {peak_s / 1e9:,.0f} GFLOP/s", (right / 1.1, peak_s), (0, 6), "right"),
        (f"ridge: {ridge:.1f}", (ridge, left * read_bytes_s), (6, 0), "left"),
    )
    for text, at, by, side in notes:
        axes.annotate(text, at, by, textcoords="offset points", color=grey, ha=side)
    for kind, colour in ((True, prefill), (False, decode)):
        chosen = [mark for mark in marks if mark.prefill is kind]
        name = "prefill" if kind else "decode step"
        axes.plot([m.intensity for m in chosen], [m.rate for m in chosen], "o", color=colour, markersize=8, label=name)
        for number, mark in enumerate(chosen):
            at, by = (mark.intensity, mark.rate), (4, -18 - 14 * (number % 2))  # neighbours may stand close together
            axes.annotate(mark.name, at, by, textcoords="offset points", color=colour)
    axes.set(xscale="log", yscale="log", xlim=(left, right), title="Prefill and decode of one core beside its roofline")
    axes.set(xlabel="operations for each byte of weights and KV", ylabel="operations a second")
    axes.set_ylim(left * read_bytes_s / 2, peak_s * 2)
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(loc="lower right")
