"""The drawings of planned days: the demand above, and the workers of both pools below; or each pool of two sides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve_bench.report.plot import LineColours, draw_both
from sim.perf.days import Day
from sim.perf.report import PoolsAt
from sim.perf.statics import Split

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from bench.slow_cluster import Look


def plot(path: Path, day: Day, history: Sequence[PoolsAt], best: Split | None) -> None:
    """Draw a day for light pages, and into a second file for dark ones. It needs matplotlib."""
    draw_both(path, (10, 6), lambda figure, theme: _draw(figure, theme, day, history, best), dpi=100)


def _draw(figure: Figure, theme: LineColours, day: Day, history: Sequence[PoolsAt], best: Split | None) -> None:
    from matplotlib.ticker import MaxNLocator

    prefill, decode, grey = theme.blue, theme.orange, theme.grey
    demand, workers = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    hours = [day.begins_h + at.observed.now_s / (60.0 * day.minutes_per_hour) for at in history]
    rates = [at.observed.demand.requests_per_s or 0.0 for at in history]
    width = max(1, len(rates) // 200)
    means = [sum(rates[max(0, i - width) : i + 1]) / len(rates[max(0, i - width) : i + 1]) for i in range(len(rates))]
    demand.fill_between(hours, means, color=grey, alpha=0.4, linewidth=0)
    demand.set(ylabel="requests/s", ylim=(0, None), title="Demand and workers over a day")
    lines = (
        ("prefill, ready", [at.observed.prefill.ready for at in history], prefill),
        ("decode, ready", [at.observed.decode.ready for at in history], decode),
        ("all that are paid for", [at.members for at in history], grey),
    )
    for name, values, colour in lines:
        workers.step(hours, values, where="post", color=colour, label=name, linewidth=1.8)
    if best is not None:
        for count, colour in ((best.prefill, prefill), (best.decode, decode), (best.workers, grey)):
            workers.axhline(count, color=colour, linestyle=":", linewidth=1.2)
        workers.plot([], [], color=grey, linestyle=":", label=f"best static split: {best.prefill} + {best.decode}")
    workers.set(xlabel="hour of the day", ylabel="workers", ylim=(0, None), xlim=(hours[0], hours[-1]))
    workers.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, steps=[1, 2, 3, 6]))
    workers.xaxis.set_major_formatter(lambda hour, _: f"{hour % 24:g}")
    workers.yaxis.set_major_locator(MaxNLocator(integer=True))
    workers.legend(loc="upper right", ncols=2, framealpha=0.7)
    for axes in (demand, workers):
        axes.grid(True, alpha=0.2)


def plot_beside(path: Path, day: Day, sides: Mapping[str, Sequence[Look]]) -> None:
    """Draw the sizes of two sides for light pages, and into a second file for dark ones. It needs matplotlib."""
    draw_both(path, (10, 6), lambda figure, theme: _draw_beside(figure, theme, day, sides), dpi=100)


def _draw_beside(figure: Figure, theme: LineColours, day: Day, sides: Mapping[str, Sequence[Look]]) -> None:
    from matplotlib.ticker import MaxNLocator

    prefill, decode = figure.subplots(2, 1, sharex=True)
    for axes, pool, colour in ((prefill, "prefill", theme.blue), (decode, "decode", theme.orange)):
        for (name, looks), line in zip(sides.items(), ("-", ":"), strict=True):
            hours = [day.begins_h + one.at_s / (60.0 * day.minutes_per_hour) for one in looks]
            axes.step(hours, [getattr(one, pool) for one in looks], line, where="post", color=colour, label=name, linewidth=1.8)
        axes.set(ylabel=f"{pool} workers, ready", ylim=(0, None), xlim=(day.begins_h, day.begins_h + day.hours))
        axes.xaxis.set_major_formatter(lambda hour, _: f"{hour % 24:g}")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="upper right", framealpha=0.7)
        axes.grid(True, alpha=0.2)
    decode.set(xlabel="hour of the day")
