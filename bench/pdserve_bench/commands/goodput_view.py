"""The view of a search: the point that runs, a line for each point, and the table of the layouts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.commands.tables import table
from pdserve_bench.layout import Layout
from pdserve_bench.row import BenchRow
from pdserve_bench.search.actions import RunAction
from pdserve_bench.search.result import GoodputResult, Point
from pdserve_bench.search.trial import Trial

_INTERVAL_S = 0.25


class SearchView:
    """It shows runs and points, and lets `keep` write each point. Inside `with`, a terminal shows the point that runs."""

    def __init__(self, console: Console, keep: Callable[[Sequence[Point]], None]) -> None:
        """Prepare the view."""
        self._console = console
        self._keep = keep
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._run: RunAction | None = None
        self._end_s = math.inf
        self._drawn_s = 0.0

    def __enter__(self) -> SearchView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def begins(self, run: RunAction, points: Sequence[Point], left_s: float) -> None:
        """Show that a run begins."""
        self._run, self._end_s = run, time.monotonic() + left_s
        self._draw(f"{_what(run.layout, run.rate_per_s)}: preparing")

    def row(self, trial: Trial, row: BenchRow) -> None:
        """Show what a run has shown so far, a few times a second."""
        if self._run is None or time.monotonic() < self._drawn_s + _INTERVAL_S:
            return
        seen = trial.estimate
        share = f"attainment {_share(seen.attained, seen.requests)} ({seen.low:.3f} to {seen.high:.3f})"
        said = share if seen.requests else "no interval yet"
        self._draw(f"{_what(self._run.layout, self._run.rate_per_s)}: {row.ended_s:.0f} s, {trial.in_flight} running, {said}")

    def ends(self, points: Sequence[Point]) -> None:
        """Keep the points, and print the last one."""
        self._keep(points)
        self._console.print(line(points[-1]))

    def _draw(self, text: str) -> None:
        if self._live is not None:
            self._drawn_s = time.monotonic()
            left_s = max(0.0, self._end_s - self._drawn_s)
            self._live.update(Text(f"{text}; {left_s / 60:.1f} min left"), refresh=True)


def line(point: Point) -> str:
    """Return one line about a point."""
    if point.refused:
        return f"{_what(point.layout, point.rate_per_s)}: does not count: {point.refused.partition('. ')[0]}"
    share = f"attainment {_share(point.attained, point.requests)} ({point.low:.3f} to {point.high:.3f})"
    said = f"{share} of {point.requests} requests in {point.measured_s:.0f} s"
    apart = point.figures.disaggregated_share
    if point.layout.disaggregated and apart is not None and apart < 1.0:
        said += f", {1 - apart:.1%} of them colocated"
    return f"{_what(point.layout, point.rate_per_s)}: {said}{', the backlog grew without bound' if point.overloaded else ''}"


def layouts(result: GoodputResult) -> Table:
    """Return the table of all layouts, the best one first."""
    title = f"goodput: requests a second of which {result.attainment:.0%} meet their targets"
    right = ["chunk", "max_num_seqs", "req/s", "interval", "req/s a worker", "points"]
    view = table(title, ["layout", "settled"], right)
    for one in result.layouts:
        count = sum(point.layout == one.layout for point in result.points)
        high = "?" if math.isinf(one.high_per_s) else f"{one.high_per_s:.3g}"
        view.add_row(
            one.layout.name,
            "yes" if one.settled else "no",
            str(one.layout.chunk_tokens),
            str(one.layout.max_num_seqs),
            f"{one.goodput_per_s:.3g}",
            f"{one.low_per_s:.3g} to {high}",
            f"{one.goodput_per_s / one.layout.workers:.3g}",
            str(count),
        )
    return view


def _what(layout: Layout, rate_per_s: float) -> str:
    return f"{layout.name}, chunk {layout.chunk_tokens}, max_num_seqs {layout.max_num_seqs}, {rate_per_s:.3g} req/s"


def _share(attained: int, requests: int) -> str:
    return f"{attained / requests:.3f}" if requests else "unknown"
