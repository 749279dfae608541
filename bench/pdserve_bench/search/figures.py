"""The figures of one point, from its rows and from what the workers count. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pdserve_bench.layout import Slo
from pdserve_bench.report.columns import columns
from pdserve_bench.report.summary import Distribution, summarise
from pdserve_bench.row import BenchRow
from pdserve_bench.search.result import Figures

_BOUNDS_S: Final = 1e-3 * np.sqrt(2.0) ** np.arange(28)
"""The upper bounds of the histogram: from 1 ms to 11.6 s."""


@dataclass(frozen=True, slots=True)
class Busy:
    """The counters of one incarnation of a worker, since its start."""

    prefill: bool
    busy_s: float
    """The time of all of its steps."""
    uptime_s: float
    prompt_s: float = 0.0
    """The part of `busy_s` in steps that compute prompts."""


Counters = Mapping[tuple[str, int], Busy]
"""The counters of all workers, by name and incarnation."""


def busy_share(before: Counters, after: Counters, *, prefill: bool) -> float | None:
    """Return the share of the time in which the workers of a role computed. None: it was not observed."""
    pairs = [(before[name], now) for name, now in after.items() if name in before and now.prefill is prefill]
    passed_s = sum(now.uptime_s - then.uptime_s for then, now in pairs)
    return min(1.0, sum(now.busy_s - then.busy_s for then, now in pairs) / passed_s) if passed_s > 0.0 else None


def prompt_share(before: Counters, after: Counters) -> float | None:
    """Return the share of all workers' computing in which prompts were computed. None: nothing was computed."""
    pairs = [(before[name], now) for name, now in after.items() if name in before]
    busy_s = sum(now.busy_s - then.busy_s for then, now in pairs)
    return sum(now.prompt_s - then.prompt_s for then, now in pairs) / busy_s if busy_s > 0.0 else None


def figures_of(rows: Sequence[BenchRow], slo: Slo, before: Counters, after: Counters) -> Figures:
    """Return the figures of a run. Rows that warmed the cluster up or were cut off do not count. What is unknown is 0."""
    summary = summarise(rows, lambda _: slo)
    return Figures(
        ttft_p50_s=_at(summary.ttft_s, "p50"),
        ttft_p99_s=_at(summary.ttft_s, "p99"),
        tpot_p50_s=_at(summary.tpot_s, "p50"),
        tpot_p99_s=_at(summary.tpot_s, "p99"),
        itl_p50_s=_at(summary.itl_s, "p50"),
        itl_p99_s=_at(summary.itl_s, "p99"),
        output_tokens_per_s=summary.output_tokens_per_s or 0.0,
        kv_bytes_per_request=summary.kv_bytes_per_request or 0.0,
        exposed_transfer_p50_s=_at(summary.exposed_transfer_s, "p50"),
        prefill_busy_share=busy_share(before, after, prefill=True),
        decode_busy_share=busy_share(before, after, prefill=False),
        itl_histogram=histogram(columns(rows, lambda _: slo).gap_s),
        disaggregated_share=disaggregated_share(rows),
    )


def disaggregated_share(rows: Sequence[BenchRow]) -> float | None:
    """Return the share of the requests that count whose prompts were computed in a prefill pool. None: it is unknown."""
    placed = [row.served.placement for row in rows if row.counts and row.served.placement]
    return placed.count("disaggregated") / len(placed) if placed else None


def histogram(gaps_s: np.ndarray) -> tuple[tuple[float, int], ...]:
    """Return the counts of gaps, by upper bounds. Bounds without gaps are left out; the last one is the longest gap."""
    if not gaps_s.size:
        return ()
    bounds_s = np.append(_BOUNDS_S, max(float(gaps_s.max()), 2 * float(_BOUNDS_S[-1])))
    counts = np.bincount(np.searchsorted(bounds_s, gaps_s), minlength=len(bounds_s))
    return tuple((float(bound), int(count)) for bound, count in zip(bounds_s, counts, strict=True) if count)


def _at(distribution: Distribution | None, name: str) -> float:
    return 0.0 if distribution is None else float(getattr(distribution, name))
