"""The server's own figures of a turn: the router's counts of the requests, and the time for which its processes waited for
cores.

A load generator on the server's own cores slows the server down. So a tool is right when it reports what the server itself saw
in the same turn: two tools may differ, and both be right. Linux counts for each thread how long it ran, and how long it was
ready to run but waited for a core. These times say why a server was slower in one turn than in another.
"""

from __future__ import annotations

import statistics
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from bench.ratios import Ratio, ratio
from bench.service.load_tools import FIGURES, Measured, TurnFailed

READ_LIMIT_S: Final = 10.0
TOLERANCE: Final = 0.05
"""The share by which a tool may differ from its server. It also sees the connection, and waits for a core itself. A late load
generator is refused beyond the same share (`MAX_LAG_OF_TTFT`)."""
HISTOGRAMS: Final = dict(
    zip(
        FIGURES,
        (
            "pdserve_time_to_first_token_seconds",
            "pdserve_time_per_output_token_seconds",
            "pdserve_e2e_request_latency_seconds",
        ),
        strict=True,
    )
)
"""The router's histogram of each figure. Each has one value for each request."""


@dataclass(frozen=True, slots=True)
class Total:
    """All values of a histogram so far: their number, and their sum."""

    count: int
    sum_s: float


@dataclass(frozen=True, slots=True)
class CpuTime:
    """The time that the threads of a process ran, and the time that they waited for a core."""

    run_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class Counters:
    """The server's counts until one moment."""

    histograms: Mapping[str, Total]
    cpu: Mapping[str, CpuTime]
    """The CPU times of its processes, by their names."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The server's figures of one turn."""

    means_s: Mapping[str, float]
    """The mean of each figure over the turn's requests."""
    cpu: Mapping[str, CpuTime]


@dataclass(frozen=True, slots=True)
class Observed:
    """The figures of one turn, by its tool and by the server."""

    tool: Measured
    server: Seen


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of a tool beside the server's own. The times are medians of the rounds' means."""

    figure: str
    tool_s: float
    server_s: float
    ratio: Ratio

    @property
    def agrees(self) -> bool:
        """The whole interval of the ratio is within the tolerance."""
        return self.ratio.low >= 1 - TOLERANCE and self.ratio.high <= 1 + TOLERANCE


def totals(text: str) -> dict[str, Total]:
    """Return the totals of the histograms in a page of metrics. Raises `KeyError` when one is missing."""
    values = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    return {name: Total(int(values[f"{metric}_count"]), values[f"{metric}_sum"]) for name, metric in HISTOGRAMS.items()}


def cpu_time(pid: int) -> CpuTime:
    """Return the CPU time of all present threads of a process, from the kernel's counts of nanoseconds."""
    run_ns = wait_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            ran, waited, _ = map(int, path.read_text().split())
            run_ns, wait_ns = run_ns + ran, wait_ns + waited
    return CpuTime(run_ns / 1e9, wait_ns / 1e9)


def counters(url: str, pids: Mapping[str, int]) -> Counters:
    """Read what the server at this address has counted. `pids` are its processes by their names."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=READ_LIMIT_S) as answer:
        text = answer.read().decode()
    return Counters(totals(text), {name: cpu_time(pid) for name, pid in pids.items()})


def seen(before: Counters, after: Counters, requests: int) -> Seen:
    """Return the server's figures between two moments. Raises `TurnFailed` unless it answered exactly `requests` requests."""
    means_s = {}
    for name, total in after.histograms.items():
        count = total.count - before.histograms[name].count
        if count != requests:
            raise TurnFailed(f"the server counted {name} of {count} requests and not of {requests}")
        means_s[name] = (total.sum_s - before.histograms[name].sum_s) / count
    cpu = {
        name: CpuTime(now.run_s - before.cpu[name].run_s, now.wait_s - before.cpu[name].wait_s)
        for name, now in after.cpu.items()
    }
    return Seen(means_s, cpu)


def compared(turns: Sequence[Observed]) -> list[Compared]:
    """Compare a tool with the server, turn by turn."""
    lines = []
    for name in FIGURES:
        tool_s, server_s = [turn.tool.means_s[name] for turn in turns], [turn.server.means_s[name] for turn in turns]
        lines.append(Compared(name, statistics.median(tool_s), statistics.median(server_s), ratio(tool_s, server_s)))
    return lines


def compared_table(names: Sequence[str], found: Sequence[Sequence[Observed]]) -> Table:
    """Draw each tool's figures beside the server's own figures of the same turns."""
    made = Table(box=None, header_style="bold")
    for name in ("figure", "tool", "by the tool", "by the server", "tool / server", f"within {TOLERANCE:.0%}"):
        made.add_column(name, justify="left" if name in ("figure", "tool") else "right", no_wrap=True)
    for lines in zip(*map(compared, found), strict=True):
        for index, (tool, one) in enumerate(zip(names, lines, strict=True)):
            times = (f"{1000 * one.tool_s:.1f}", f"{1000 * one.server_s:.1f}")
            shown = f"{one.ratio.median:.3f} ({one.ratio.low:.3f} to {one.ratio.high:.3f})"
            made.add_row("" if index else f"{one.figure} mean, ms", tool, *times, shown, "yes" if one.agrees else "NO")
    return made


def cores_table(names: Sequence[str], found: Sequence[Sequence[Observed]]) -> Table:
    """Draw how long the server's processes ran and waited for a core in a turn of each tool. The last column compares the sum
    of both with the first tool's turns."""
    made = Table(box=None, header_style="bold")
    for name in ("process", "tool", "ran, s", "waited for a core, s", "both / first tool's"):
        made.add_column(name, justify="left" if name in ("process", "tool") else "right", no_wrap=True)
    for process in found[0][0].server.cpu:
        times = [[turn.server.cpu[process] for turn in turns] for turns in found]
        busy_s = [[one.run_s + one.wait_s for one in rounds] for rounds in times]
        for index, (tool, rounds) in enumerate(zip(names, times, strict=True)):
            medians = (statistics.median(values) for values in zip(*((one.run_s, one.wait_s) for one in rounds), strict=True))
            told = str(ratio(busy_s[index], busy_s[0])) if index else ""
            made.add_row("" if index else process, tool, *(f"{value:.2f}" for value in medians), told)
    return made
