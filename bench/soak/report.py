"""The result of a soak: tables, and the verdict."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from bench.soak.load import Tally
from testkit.faults import Restart
from testkit.footprint import Footprint


@dataclass(slots=True)
class Report:
    """The result of one soak."""

    minutes: float
    seed: int
    tally: Tally
    faults: Counter[str]
    restarts: list[Restart]
    growth: list[tuple[str, Footprint, Footprint]] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    num_watched: int = 0
    broken: list[str] = field(default_factory=list)
    """Errors of the soak itself, and of healing."""

    @property
    def passed(self) -> bool:
        """Tell whether a request has succeeded and no check has failed."""
        return self.tally.ok > 0 and not (self.tally.num_violations or self.leaks or self.broken)

    def show(self, console: Console) -> None:
        """Print the tables, a line for everything that was wrong, and the verdict."""
        console.print(self._requests())
        console.print(self._faults())
        console.print(self._growth())
        for title, lines in (
            ("violation", self.tally.violations),
            ("leak", self.leaks),
            ("broken", self.broken),
        ):
            for line in lines:
                console.print(f"{title}: {line}", style="red", markup=False, highlight=False)
        verdict = "[green]passed[/]" if self.passed else "[red]FAILED[/]"
        console.print(f"{verdict}: {self.minutes:g} minutes, seed {self.seed}")

    def _requests(self) -> Table:
        tally = self.tally
        table = Table("requests", "count", title="Requests, each compared with its undisturbed run")
        table.add_row("ended as undisturbed", str(tally.ok))
        table.add_row("  of them after a retry or rebind within the cluster", str(tally.recovered))
        table.add_row("  of them after their client had tried again", str(tally.tried_again))
        table.add_row("left by their client", str(tally.left))
        table.add_row("past the deadline that they had asked for", str(tally.late))
        for reason, count in sorted(tally.given_up.items()):
            table.add_row(f"given up by their client: {reason}", str(count))
        table.add_row("wrong tokens, hangs, failures without a reason", str(tally.num_violations))
        table.add_section()
        for reason, count in sorted(tally.failures.items()):
            table.add_row(f"tries that failed: {reason}", str(count))
        table.add_section()
        table.add_row("tokens compared", str(tally.tokens))
        if tally.ttft_s:
            times_ms = sorted(1e3 * s for _, s in tally.ttft_s)
            table.add_row("TTFT ms, median", f"{statistics.median(times_ms):.0f}")
            table.add_row("TTFT ms, worst", f"{times_ms[-1]:.0f}")
        return table

    def _faults(self) -> Table:
        table = Table("faults", "count", title="Faults")
        for kind, count in sorted(self.faults.items()):
            table.add_row(kind, str(count))
        table.add_section()
        for (name, how), count in sorted(Counter((r.name, ended(r)) for r in self.restarts).items()):
            table.add_row(f"restarts of {name}: {how}", str(count))
        return table

    def _growth(self) -> Table:
        table = Table(
            "process",
            "MiB",
            "descriptors",
            "threads",
            title=f"Settled -> last seen: the oldest of each member, of {self.num_watched} processes watched",
        )
        for name, was, now in self.growth:
            mib = f"{was.rss_bytes >> 20} -> {now.rss_bytes >> 20}"
            table.add_row(name, mib, f"{was.fds} -> {now.fds}", f"{was.threads} -> {now.threads}")
        return table


def ended(restart: Restart) -> str:
    """Say how the process before a restart ended."""
    if restart.aborted:
        return f"died of itself (signal {-restart.status})"
    return f"killed (signal {-restart.status})" if restart.status < 0 else f"exit {restart.status}"
