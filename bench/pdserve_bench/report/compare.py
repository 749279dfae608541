"""Two runs of one workload side by side: each figure with its ratio, the interval, and what can be said. Pure.

The runs are drawn independently of each other, also if they had the same seed. A figure is better or worse only where the
whole interval of its ratio lies on one side of 1; with many figures, about one in twenty does so by chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from pdserve_bench.layout import Slo
from pdserve_bench.report.bootstrap import (
    BootstrapMean,
    Interval,
    Percentile,
    Statistic,
    compare,
    figure,
    mean_of,
    percentile_of,
)
from pdserve_bench.report.columns import Columns, Floats, columns
from pdserve_bench.report.files import Run
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
