"""Two runs of one workload side by side: each figure with its ratio, the interval, and what can be said. Pure.

The runs are drawn independently of each other, also if they had the same seed. A figure is better or worse only where the
whole interval of its ratio lies on one side of 1; with many figures, about one in twenty does so by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

import numpy as np

from pdserve_bench.layout import Slo
from pdserve_bench.report.files import Run
from pdserve_bench.report.summary import Columns, Floats, Ints, columns
from pdserve_bench.row import Served

BETTER: Final = "better"
WORSE: Final = "worse"
UNKNOWN: Final = "cannot be told apart"
NOT_COMPARED: Final = "not compared"


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of two runs. `ratio` and `difference` are of b to a; None where they are not computed."""

    name: str
    unit: str
    a: float | None
    b: float | None
    ratio: Interval | None
    difference: Interval | None
    verdict: str
    """B against A: "better", "worse", "cannot be told apart", or "not compared"."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs. `same_workload` False: their workloads differ or are unknown, so no ratio means anything, and none is there."""

    figures: tuple[Compared, ...]
    differences: tuple[tuple[str, Any, Any], ...]
    """The differences of their meta: the field, A's value and B's value."""
    same_workload: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as plain data. NaN becomes None."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


@dataclass(frozen=True, slots=True)
class _Figure:
    """A figure that is compared. `of` returns None where a run does not have it."""

    name: str
    unit: str
    of: Callable[[Columns], Statistic | None]
    more_is_better: bool = False


def compare_runs(a: Run, b: Run, slo_of: Callable[[str], Slo], *, seed: int = 0) -> Comparison:
    """Compare run B with run A. seed: of the bootstrap; the same one gives the same intervals."""
    same = a.meta.get("workload_fingerprint") == b.meta.get("workload_fingerprint") is not None
    of_a, of_b = columns(a.rows, slo_of), columns(b.rows, slo_of)
    figures = tuple(_compared(one, of_a, of_b, seed if same else None) for one in FIGURES)
    return Comparison(tuple(one for one in figures if one is not None), tuple(_differences(a.meta, b.meta)), same)


def _compared(one: _Figure, of_a: Columns, of_b: Columns, seed: int | None) -> Compared | None:
    """Compare one figure. None: no run has it. seed None: only the figures themselves are wanted."""
    a, b = one.of(of_a), one.of(of_b)
    value_a, value_b = _value(a), _value(b)
    if value_a is None and value_b is None:
        return None
    if a is None or b is None or seed is None or value_a is None or value_b is None:
        return Compared(one.name, one.unit, value_a, value_b, None, None, NOT_COMPARED)
    ratio, difference = compare(b, a, seed=seed)
    said = verdict(ratio, difference, one.more_is_better)
    return Compared(one.name, one.unit, value_a, value_b, ratio, difference, said)


def verdict(ratio: Interval, difference: Interval, more_is_better: bool) -> str:
    """Say what the intervals allow. The difference decides where the ratio is unknown, such as against 0."""
    low, high = (ratio.low - 1, ratio.high - 1) if not math.isnan(ratio.low) else (difference.low, difference.high)
    if low > 0:
        return BETTER if more_is_better else WORSE
    if high < 0:
        return WORSE if more_is_better else BETTER
    return UNKNOWN


def _value(statistic: Statistic | None) -> float | None:
    """Return the figure itself. None: the run does not have it."""
    value = math.nan if statistic is None else figure(statistic)
    return None if math.isnan(value) else value


def _differences(a: Mapping[str, Any], b: Mapping[str, Any], under: str = "") -> list[tuple[str, Any, Any]]:
    """List the fields of two metas that differ, without times and load, which always do."""
    found: list[tuple[str, Any, Any]] = []
    for name in sorted({*a, *b} - {"started", "ended", "load_average"}):
        one, other = a.get(name), b.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            found += _differences(one, other, f"{under}{name}.")
        elif one != other:
            found.append((under + name, one, other))
    return found


def _time(name: str, of: Callable[[Columns], Floats]) -> tuple[_Figure, ...]:
    """Return the figures of one time for each request."""
    return (
        _Figure(f"{name} mean", "s", lambda run: mean_of(of(run))),
        *(_Figure(f"{name} p{percent}", "s", _percentile(of, percent)) for percent in (50, 90, 99)),
    )


def _percentile(of: Callable[[Columns], Floats], percent: float) -> Callable[[Columns], Statistic]:
    return lambda run: percentile_of(of(run), percent)


def _gaps(percent: float) -> Callable[[Columns], Statistic]:
    return lambda run: Percentile(run.gap_s, run.gap_owner, len(run.rows), percent)


def _served(field: Callable[[Served], float | None]) -> Callable[[Columns], Floats]:
    return lambda run: run.served(field)


def _rate(amount: Callable[[Columns], Floats]) -> Callable[[Columns], Statistic | None]:
    """Return the amounts of answered requests a second. Each request stands for the time since the end of the one before it,
    and the first one for the time since the run began, so the times of all add up to the measured span."""

    def of(run: Columns) -> Statistic | None:
        if not len(run.rows):
            return None
        order = np.argsort(run.ended_s, kind="stable")
        times_s = np.diff(run.ended_s[order], prepend=run.sent_s.min())
        return BootstrapMean((amount(run) * run.ok)[order], times_s)

    return of


def _mean_gap(run: Columns) -> Statistic:
    requests = len(run.rows)
    sums = np.bincount(run.gap_owner, weights=run.gap_s, minlength=requests)
    return BootstrapMean(np.asarray(sums, dtype=np.float64), np.bincount(run.gap_owner, minlength=requests).astype(np.float64))


FIGURES: Final[tuple[_Figure, ...]] = (
    *_time("TTFT", lambda run: run.ttft_s),
    _Figure("ITL mean", "s", _mean_gap),
    *(_Figure(f"ITL p{percent}", "s", _gaps(percent)) for percent in (50, 90, 99)),
    *_time("TPOT", lambda run: run.tpot_s),
    *_time("E2E", lambda run: run.e2e_s),
    *_time("queue", _served(lambda served: served.queue_s)),
    *_time("prefill", _served(lambda served: served.prefill_s)),
    *_time("exposed transfer", _served(lambda served: served.exposed_transfer_s)),
    _Figure("requests", "1/s", _rate(lambda run: np.ones(len(run.rows))), more_is_better=True),
    _Figure("prompt tokens", "1/s", _rate(lambda run: run.prompt_tokens.astype(np.float64)), more_is_better=True),
    _Figure("output tokens", "1/s", _rate(lambda run: run.output_tokens.astype(np.float64)), more_is_better=True),
    _Figure("goodput", "1/s", _rate(lambda run: run.attained.astype(np.float64)), more_is_better=True),
    _Figure("attainment", "share", lambda run: mean_of(run.attained.astype(np.float64)), more_is_better=True),
    _Figure("KV", "B/request", lambda run: mean_of(run.served(lambda served: served.kv_bytes))),
)


def _plain(value: Any) -> Any:
    """Return the value with None for NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# Intervals of a run's figures: a percentile bootstrap over blocks of consecutive requests. Pure.
#
# Requests that follow each other share a queue, so they are not independent, and drawing them one by one would give intervals
# that are too narrow. Whole blocks of them are drawn instead, with replacement and around the end (the circular block bootstrap
# of Politis and Romano, 1992). A draw is a weight for each request, which says how often it was drawn; a statistic turns
# weights into its figure, so a request may have any number of values, such as gaps. Draws come in batches, as rows of a matrix.
#
# With some hundred requests an interval holds the truth somewhat less often than its level says: 90 to 93 % instead of 95 %.


REPLICATES: Final = 1000
"""The number of draws. The ends of a 95 % interval are then between the 25th and 26th value from each end."""
LEVEL: Final = 0.95
MAX_WEIGHED: Final = 200_000_000
"""The most values that the draws of one interval weigh, about 2 s of one core. More values get fewer draws."""
MIN_REPLICATES: Final = 200
BATCH: Final = 1 << 18
"""The values that a batch of draws weighs: 2 MiB for each of its arrays, which stay in the cache of a core."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its interval. NaN: it cannot be computed."""

    estimate: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Tell whether the value is in the interval."""
        return self.low <= value <= self.high


class Statistic(Protocol):
    """A figure of `requests` requests, for any weights of them."""

    @property
    def requests(self) -> int:
        """The number of requests, which is the number of weights."""
        ...

    @property
    def values(self) -> int:
        """The number of values that one draw weighs."""
        ...

    def __call__(self, weights: Ints) -> Floats:
        """Return the figure of each draw. NaN: its weights are on no value. weights: [draws, requests]. Returns: [draws]."""
        ...


class BootstrapMean:
    """The sum of amounts over the sum of bases: a mean where each base is 1, and a rate where they are times."""

    def __init__(self, amounts: Floats, bases: Floats) -> None:
        """Take the amounts and the bases. Both: [requests]."""
        self._amounts = amounts
        self._bases = bases
        self.requests = self.values = len(amounts)

    def __call__(self, weights: Ints) -> Floats:
        """Return the weighted ratios. weights: [draws, requests]. Returns: [draws]."""
        return _over(weights @ self._amounts, weights @ self._bases)


class Percentile:
    """A percentile that interpolates linearly, as numpy's does, over values that belong to requests."""

    def __init__(self, values: Floats, owner: Ints, requests: int, percent: float) -> None:
        """Take the values and the index of the request of each. Both: [values], without NaN."""
        order = np.argsort(values, kind="stable")
        self._sorted = values[order]
        self._owner = owner[order]
        self._share = percent / 100
        self.requests = requests
        self.values = len(values)

    def __call__(self, weights: Ints) -> Floats:
        """Return the percentiles of the values, each as often as its request was drawn. weights: [draws, requests]."""
        if not self.values:
            return np.full(len(weights), np.nan)
        counts = np.cumsum(weights[:, self._owner], axis=1)
        ranks = np.maximum(counts[:, -1] - 1, 0) * self._share
        below, above = (self._at(counts, rank) for rank in (np.floor(ranks), np.ceil(ranks)))
        got: Floats = below + (above - below) * (ranks - np.floor(ranks))
        return np.where(counts[:, -1] > 0, got, np.nan)

    def _at(self, counts: Ints, ranks: Floats) -> Floats:
        """Return the value of each draw at a rank, counted from 0."""
        places = np.array([np.searchsorted(row, rank, side="right") for row, rank in zip(counts, ranks, strict=True)])
        found: Floats = self._sorted[np.minimum(places, self.values - 1)]
        return found


def mean_of(values: Floats) -> BootstrapMean:
    """Return the mean of one value for each request. NaN stands for requests without one."""
    told = ~np.isnan(values)
    return BootstrapMean(np.where(told, values, 0.0), told.astype(np.float64))


def percentile_of(values: Floats, percent: float) -> Percentile:
    """Return a percentile of one value for each request. NaN stands for requests without one."""
    owner = np.flatnonzero(~np.isnan(values))
    return Percentile(values[owner], owner, len(values), percent)


def interval(statistic: Statistic, *, seed: int, level: float = LEVEL) -> Interval:
    """Return the figure with its interval. seed: the same one gives the same interval."""
    return _between(figure(statistic), _replicates(statistic, seed), level)


def figure(statistic: Statistic) -> float:
    """Return the figure of the run itself, in which every request weighs the same."""
    return float(statistic(np.ones((1, statistic.requests), dtype=np.int64))[0])


def compare(of_b: Statistic, of_a: Statistic, *, seed: int, level: float = LEVEL) -> tuple[Interval, Interval]:
    """Return the ratio b / a and the difference b - a of a figure of two runs, each drawn by itself."""
    count = min(_count(of_a), _count(of_b))
    draws_a, draws_b = _replicates(of_a, seed, count), _replicates(of_b, seed + 1, count)
    a, b = figure(of_a), figure(of_b)
    ratio = _between(b / a if a else math.nan, _over(draws_b, draws_a), level)
    return ratio, _between(b - a, draws_b - draws_a, level)


def draws(requests: int, replicates: int, seed: int, batch: int) -> Iterator[Ints]:
    """Yield the weights of at most `batch` draws at a time: [draws, requests]. Those of each draw add up to `requests`."""
    rng = np.random.default_rng(seed)
    length = block_length(requests)
    blocks = -(-requests // length)
    for begin in range(0, replicates, batch):
        count = min(batch, replicates - begin)
        begins = rng.integers(0, requests, size=(count, blocks))
        drawn = ((begins[:, :, None] + np.arange(length)) % requests).reshape(count, -1)[:, :requests]
        places = (drawn + requests * np.arange(count)[:, None]).ravel()
        yield np.bincount(places, minlength=count * requests).reshape(count, requests)


def block_length(requests: int) -> int:
    """Return the number of requests in a block: the square root of all. It grows with the run, as blocks must, and is longer
    than the usual cube root, because the requests of one burst stay in the queue together for long."""
    return max(1, math.isqrt(requests))


def _count(statistic: Statistic) -> int:
    return max(MIN_REPLICATES, min(REPLICATES, MAX_WEIGHED // max(1, statistic.values)))


def _replicates(statistic: Statistic, seed: int, count: int | None = None) -> Floats:
    count = _count(statistic) if count is None else count
    if not statistic.values:
        return np.full(count, np.nan)
    batch = max(1, BATCH // max(statistic.requests, statistic.values))
    return np.concatenate([statistic(weights) for weights in draws(statistic.requests, count, seed, batch)])


def _over(above: Floats, below: Floats) -> Floats:
    """Divide; NaN where the divisor is 0 or NaN."""
    ratios: Floats = np.divide(above, below, out=np.full(len(below), np.nan), where=below != 0)
    return ratios


def _between(estimate: float, replicates: Floats, level: float) -> Interval:
    """Return the interval between the percentiles of the draws. It is unknown if draws without the figure could decide it."""
    told = replicates[~np.isnan(replicates)]
    if math.isnan(estimate) or len(told) < level * len(replicates):
        return Interval(estimate, math.nan, math.nan)
    low, high = np.percentile(told, (50 * (1 - level), 50 * (1 + level)))
    return Interval(estimate, float(low), float(high))
