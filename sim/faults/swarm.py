"""The swarm: runs of many seeds in several processes, and a report of them."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sim.faults.run import RunReport, run_seed


@dataclass(slots=True)
class SwarmReport:
    """The sums over all runs of a swarm, and the reports of the runs that failed."""

    failed: list[RunReport] = field(default_factory=list)
    runs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    callbacks: int = 0
    messages: int = 0
    virtual_s: float = 0.0
    flips: int = 0
    retried: int = 0
    wall_s: float = 0.0
    last_seed: int = -1

    def add(self, report: RunReport) -> None:
        """Add one run."""
        self.runs += 1
        self.last_seed = report.seed
        self.outcomes += report.outcomes
        self.callbacks += report.callbacks
        self.messages += report.messages
        self.virtual_s += report.virtual_s
        self.flips += report.flips
        self.retried += report.attempts
        if report.problems:
            self.failed.append(report)

    def lines(self) -> list[str]:
        """Write the report as lines of text."""
        total = sum(self.outcomes.values())
        ended = ", ".join(f"{name} {count}" for name, count in self.outcomes.most_common())
        wall_s = max(self.wall_s, 1e-9)
        return [
            f"{self.runs} seeds in {self.wall_s:.0f} s ({self.wall_s / max(1, self.runs):.2f} s each): "
            f"{self.virtual_s / 3600:.1f} virtual hours, {self.messages} messages, {self.callbacks / wall_s:.0f} events/s",
            f"{total} requests: {ended}; {self.retried} retries among those that ended well; {self.flips} role flips",
            *(line for report in self.failed for line in failure_lines(report)),
            f"{len(self.failed)} seeds failed",
        ]


def failure_lines(report: RunReport) -> list[str]:
    """Describe a failed run: the command that repeats it, and its first problems."""
    return [
        f"seed {report.seed} failed; again: python -m sim.faults --seed {report.seed}",
        *(f"    {problem}" for problem in report.problems[:5]),
    ]


def run_swarm(first: int, count: int, *, jobs: int, progress: Callable[[SwarmReport], None] = lambda _: None) -> SwarmReport:
    """Run the seeds [first, first + count) in `jobs` processes. Of the report, only the times depend on `jobs`."""
    began_s = time.monotonic()
    swarm = SwarmReport()
    with mapped(jobs) as apply:
        for report in apply(run_seed, range(first, first + count)):
            swarm.add(report)
            swarm.wall_s = time.monotonic() - began_s
            progress(swarm)
    swarm.failed.sort(key=lambda report: report.seed)
    return swarm


@contextmanager
def mapped(jobs: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Give a `map` that works in this process for one job, and in `jobs` processes for more."""
    if jobs <= 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:  # a process that cannot start raises
        try:
            yield lambda work, items: pool.map(work, items, chunksize=4)
        finally:
            pool.shutdown(cancel_futures=True)
