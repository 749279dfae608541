"""The rows of a run as arrays, which every figure is computed from. Pure.

Only requests that were answered whole count for times, as in vLLM's and AIPerf's benchmarks. NaN stands for what is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdserve_bench.layout import Slo
from pdserve_bench.row import BenchRow, Served

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """The measured requests of a run, in the order in which they were sent. Arrays have one value for each request, except
    `gap_s` and `gap_owner`. Times are seconds."""

    rows: tuple[BenchRow, ...]
    """The requests that count: they neither warmed the server up nor were cut off by the end of the run."""
    ok: Bools
    attained: Bools
    """The request was answered whole and met both targets of its class."""
    sent_s: Floats
    ended_s: Floats
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats
    gap_s: Floats
    """The times between messages that follow each other, of all answered requests."""
    gap_owner: Ints
    """The index of the request that each gap belongs to."""
    prompt_tokens: Ints
    output_tokens: Ints

    def served(self, field: Callable[[Served], float | None]) -> Floats:
        """Return one field of the server's reports of answered requests; NaN where the server did not say."""
        return _floats([field(row.served) if row.ok else None for row in self.rows])


def columns(rows: Sequence[BenchRow], slo_of: Callable[[str], Slo]) -> Columns:
    """Turn the rows of a run into arrays. `slo_of` returns the targets of a class by its name."""
    measured = tuple(sorted((row for row in rows if row.counts), key=lambda row: (row.sent_s, row.number)))
    slos = {name: slo_of(name) for name in sorted({row.slo_class for row in measured})}
    gap_s, gap_owner = _gaps(measured)
    return Columns(
        rows=measured,
        ok=np.array([row.ok for row in measured], dtype=np.bool_),
        attained=np.array([row.ok and slos[row.slo_class].met(row.ttft_s, row.tpot_s) for row in measured], dtype=np.bool_),
        sent_s=_floats([row.sent_s for row in measured]),
        ended_s=_floats([row.ended_s for row in measured]),
        ttft_s=_floats([row.ttft_s if row.ok else None for row in measured]),
        tpot_s=_floats([row.tpot_s if row.ok else None for row in measured]),
        e2e_s=_floats([row.e2e_s if row.ok else None for row in measured]),
        gap_s=gap_s,
        gap_owner=gap_owner,
        prompt_tokens=np.array([row.prompt_tokens for row in measured], dtype=np.int64),
        output_tokens=np.array([row.output_tokens for row in measured], dtype=np.int64),
    )


def known(values: Floats) -> Floats:
    """Return the values without NaN."""
    kept: Floats = values[~np.isnan(values)]
    return kept


def _gaps(rows: Sequence[BenchRow]) -> tuple[Floats, Ints]:
    """Return the gaps of all answered requests, and the index of the request of each gap."""
    counts = np.array([len(row.arrivals) if row.ok else 0 for row in rows], dtype=np.int64)
    answered = (row.arrivals for row in rows if row.ok)
    times_s = np.fromiter((time_s for time_s, _ in chain.from_iterable(answered)), dtype=np.float64, count=int(counts.sum()))
    owner = np.repeat(np.arange(len(rows), dtype=np.int64), counts)
    within = owner[1:] == owner[:-1]
    return np.diff(times_s)[within], owner[1:][within]


def _floats(values: Sequence[float | None]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
