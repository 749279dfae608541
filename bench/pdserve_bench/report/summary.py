"""The figures of a run. Pure.

The definitions are those of `vllm bench serve` and AIPerf where both agree. Requests that warmed the server up count nowhere.
Times are of requests that were answered whole; percentiles interpolate linearly between two values. Rates are over the
measured span, which begins when the first measured request is sent and ends when the last one has ended. So the span holds the
tail in which requests end and none begins (`drain_s`), and rates of a short run are lower than those of a long one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pdserve_bench.layout import Slo
from pdserve_bench.load.target import NEVER_SENT
from pdserve_bench.row import BenchRow, Served

STALL_S: Final = 0.1
"""A gap above this counts as a stall. Ten tokens a second are faster than people read, and a longer gap can be seen."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """The distribution of one figure. The unit is that of its values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Floats) -> Distribution | None:
        """Return the distribution of the values that are no NaN. None: there are none."""
        values = known(values)
        if not values.size:
            return None
        p50, p90, p95, p99 = (float(one) for one in np.percentile(values, (50, 90, 95, 99)))
        return cls(int(values.size), float(values.mean()), p50, p90, p95, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class ClassSummary:
    """The figures of the requests of one class."""

    requests: int
    completed: int
    attained: int
    """The requests that were answered whole and met both targets."""
    attainment: float
    """Their share of all requests of the class. A failed request did not attain."""
    goodput_per_s: float | None
    ttft_s: Distribution | None
    tpot_s: Distribution | None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a whole run. None: the figure is unknown, or there was nothing to compute it from."""

    requests: int
    """All measured requests. They are `completed` or failed."""
    completed: int
    errors: dict[str, int]
    """Failed requests by reason, the most frequent one first."""
    warm_up: int
    """The requests that only warmed the server up."""
    cut: int
    """The requests that still ran when the run was ended early. No figure counts them, so slow requests are underrated if
    they are many."""
    span_s: float | None
    """The time from the first sending to the last end."""
    drain_s: float | None
    """The part of the span after the last sending."""
    ttft_s: Distribution | None
    itl_s: Distribution | None
    """The gaps between messages with tokens."""
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    queue_s: Distribution | None
    """The times in the router's queue, as the server reports them. So are the next three."""
    prefill_s: Distribution | None
    transfer_s: Distribution | None
    exposed_transfer_s: Distribution | None
    stall_share: float | None
    """The share of gaps above `STALL_S`."""
    requests_per_s: float | None
    prompt_tokens_per_s: float | None
    """The prompt tokens of answered requests a second. The next one counts output tokens likewise."""
    output_tokens_per_s: float | None
    attained: int
    attainment: float | None
    """The share of all requests that were answered whole and met both targets."""
    goodput_per_s: float | None
    """The requests a second that met both targets."""
    goodput_per_worker_s: float | None
    """The same for each worker. None: the number of workers is unknown."""
    classes: dict[str, ClassSummary]
    send_lag_s: Distribution | None
    """The times by which the generator was late. Large ones mean that the generator was the limit, not the cluster."""
    disaggregated_share: float | None
    """The share of the answered requests whose prompt was computed on a prefill worker."""
    kv_bytes: int | None
    """The bytes of KV that were moved for answered requests."""
    kv_bytes_per_request: float | None
    replayed: int | None
    """The requests that needed more than one attempt."""
    cached_prompt_share: float | None
    """The share of the prompt tokens whose KV was cached."""

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as plain dictionaries, numbers and strings."""
        return asdict(self)


def summarise(rows: Sequence[BenchRow], slo_of: Callable[[str], Slo], *, workers: int | None = None) -> Summary:
    """Compute the figures of a run.

    rows: in any order. slo_of: returns the targets of a class by its name. workers: the number of workers that served.
    """
    run = columns(rows, slo_of)
    span_s, drain_s = _span(run)
    goodput = _rate(int(run.attained.sum()), span_s)
    names = np.array([row.slo_class for row in run.rows], dtype=np.str_)
    return Summary(
        requests=len(run.rows),
        completed=int(run.ok.sum()),
        errors=dict(Counter(sorted(row.error for row in run.rows if row.error)).most_common()),
        warm_up=sum(row.warm_up for row in rows),
        cut=sum(row.cut and not row.warm_up for row in rows),
        span_s=span_s,
        drain_s=drain_s,
        ttft_s=Distribution.of(run.ttft_s),
        itl_s=Distribution.of(run.gap_s),
        tpot_s=Distribution.of(run.tpot_s),
        e2e_s=Distribution.of(run.e2e_s),
        queue_s=Distribution.of(run.served(lambda served: served.queue_s)),
        prefill_s=Distribution.of(run.served(lambda served: served.prefill_s)),
        transfer_s=Distribution.of(run.served(lambda served: served.transfer_s)),
        exposed_transfer_s=Distribution.of(run.served(lambda served: served.exposed_transfer_s)),
        stall_share=float((run.gap_s > STALL_S).mean()) if run.gap_s.size else None,
        requests_per_s=_rate(int(run.ok.sum()), span_s),
        prompt_tokens_per_s=_rate(int(run.prompt_tokens[run.ok].sum()), span_s),
        output_tokens_per_s=_rate(int(run.output_tokens[run.ok].sum()), span_s),
        attained=int(run.attained.sum()),
        attainment=float(run.attained.mean()) if len(run.rows) else None,
        goodput_per_s=goodput,
        goodput_per_worker_s=goodput / workers if goodput is not None and workers else None,
        classes={str(name): _class(run, names == name, span_s) for name in np.unique(names)},
        send_lag_s=Distribution.of(np.array([row.send_lag_s for row in run.rows if row.error not in NEVER_SENT], np.float64)),
        **_of_the_server(run),
    )


def _span(run: Columns) -> tuple[float | None, float | None]:
    """Return the measured span, and its part after the last sending."""
    if not len(run.rows):
        return None, None
    end_s = float(run.ended_s.max())
    return end_s - float(run.sent_s.min()), max(0.0, end_s - float(run.sent_s.max()))


def _rate(count: int, span_s: float | None) -> float | None:
    return count / span_s if span_s else None


def _class(run: Columns, mine: Bools, span_s: float | None) -> ClassSummary:
    attained = int(run.attained[mine].sum())
    return ClassSummary(
        requests=int(mine.sum()),
        completed=int(run.ok[mine].sum()),
        attained=attained,
        attainment=attained / int(mine.sum()),
        goodput_per_s=_rate(attained, span_s),
        ttft_s=Distribution.of(run.ttft_s[mine]),
        tpot_s=Distribution.of(run.tpot_s[mine]),
    )


def _of_the_server(run: Columns) -> dict[str, Any]:
    """Return the figures that only the server can tell."""
    served = [row.served for row in run.rows if row.ok]
    placements = [one.placement for one in served if one.placement]
    kv_bytes = [one.kv_bytes for one in served if one.kv_bytes is not None]
    attempts = [row.served.attempts for row in run.rows if row.served.attempts is not None]
    cached = [(row.served.cached_prompt_tokens, row.prompt_tokens) for row in run.rows if row.ok]
    told = [(hit, of) for hit, of in cached if hit is not None]
    prompt_tokens = sum(of for _, of in told)
    return {
        "disaggregated_share": placements.count("disaggregated") / len(placements) if placements else None,
        "kv_bytes": sum(kv_bytes) if kv_bytes else None,
        "kv_bytes_per_request": sum(kv_bytes) / len(kv_bytes) if kv_bytes else None,
        "replayed": sum(count > 1 for count in attempts) if attempts else None,
        "cached_prompt_share": sum(hit for hit, _ in told) / prompt_tokens if prompt_tokens else None,
    }


# The rows of a run as arrays, which every figure is computed from. Pure.
#
# Only requests that were answered whole count for times, as in vLLM's and AIPerf's benchmarks. NaN stands for what is unknown.


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
