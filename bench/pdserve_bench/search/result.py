"""The result of a search for goodput: a verdict is made of it, and a search resumes by its file.

Rates are requests a second of the whole cluster; `rate / ranks` is the goodput of one core or GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from pdserve.core.errors import ConfigError
from pdserve_bench.layout import Layout, Slo
from pdserve_bench.report.files import read_bytes, write_whole
from pdserve_bench.report.summary import Distribution, columns, summarise
from pdserve_bench.row import BenchRow
from pdserve_bench.search.reshape import Home
from pdserve_bench.search.settings import SearchSettings


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one point, over all requests that were measured there."""

    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    itl_p50_s: float
    itl_p99_s: float
    output_tokens_per_s: float
    kv_bytes_per_request: float
    exposed_transfer_p50_s: float
    prefill_busy_share: float | None = None
    """The share of the time in which the prefill workers computed. None: it was not observed."""
    decode_busy_share: float | None = None
    itl_histogram: tuple[tuple[float, int], ...] = ()
    """(upper bound in seconds, gaps up to it and above the bound before)."""
    disaggregated_share: float | None = None
    """The share of the requests whose prompts were computed in the prefill pool. None: the router did not say."""


@dataclass(frozen=True, slots=True)
class Point:
    """One rate at one layout, as it was measured."""

    layout: Layout
    rate_per_s: float
    """The mean rate of arrivals that was asked for."""
    requests: int
    attained: int
    """The requests that were answered whole and met both targets."""
    low: float
    high: float
    """The 95 % interval of the attainment."""
    measured_s: float
    figures: Figures
    refused: str = ""
    """The reason for which the point does not count, such as a generator that was late. Empty: it counts."""
    overloaded: bool = False
    """The backlog grew without bound, so the run was ended: the rate is too high, whatever the interval says."""

    @property
    def attainment(self) -> float:
        """The share of the requests that met both targets."""
        return self.attained / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """The goodput of one layout: the highest rate that keeps the target attainment, and its 95 % interval."""

    layout: Layout
    goodput_per_s: float
    low_per_s: float
    high_per_s: float
    settled: bool
    """The interval is as narrow as was asked for, or the layout can no longer be the best one."""


Device = Literal["worker", "rank", "core", "GPU"]
"""The place of one rank. A worker: no worker is a gang. A rank: nobody said on what the ranks of a gang compute."""


@dataclass(frozen=True, slots=True)
class GoodputResult:
    """A whole search. `meta` has commit, hardware, model, configuration and seed, as every result file has."""

    slo: Slo
    attainment: float
    """The share of the requests that should meet both targets."""
    workload: dict[str, object]
    """The workload as its file or flags gave it."""
    layouts: tuple[LayoutResult, ...]
    points: tuple[Point, ...]
    complete: bool
    """False: the search was interrupted or ran out of its budget, and may be resumed."""
    meta: dict[str, object] = field(default_factory=dict)
    device: Device = "worker"

    @property
    def best(self) -> LayoutResult | None:
        """The layout with the highest goodput. None: no layout was measured."""
        return max(self.layouts, key=lambda one: one.goodput_per_s, default=None)

    @property
    def best_colocated(self) -> LayoutResult | None:
        """The best layout without a prefill pool: the baseline on the same workers."""
        return max(
            (one for one in self.layouts if not one.layout.disaggregated), key=lambda one: one.goodput_per_s, default=None
        )

    @property
    def best_disaggregated(self) -> LayoutResult | None:
        """The best layout with two pools."""
        return max((one for one in self.layouts if one.layout.disaggregated), key=lambda one: one.goodput_per_s, default=None)


# The figures of one point, from its rows and from what the workers count. Pure.


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


# The file of a search: its result so far, and what a search needs to go on. JSON, written whole or not at all.


FORMAT: Final = "pdserve-bench-goodput"
VERSION: Final = 2
"""The version of the format. A search goes on with no other one."""


@dataclass(frozen=True, slots=True)
class SearchFile:
    """A search as its file holds it."""

    settings: SearchSettings
    identity: dict[str, Any]
    """The values that must be equal for a search to go on: the workload, the seed, and the cluster. JSON's types only."""
    result: GoodputResult
    home: Home | None = None
    """The layout that the search must bring back. None: it is back."""


def write_search(path: Path, search: SearchFile) -> None:
    """Write the file. Raises `ConfigError` when the disk refuses."""
    document = msgspec.to_builtins(search.result)
    document |= {
        "format": FORMAT,
        "version": VERSION,
        "settings": msgspec.to_builtins(search.settings),
        "identity": search.identity,
        "home": msgspec.to_builtins(search.home),
    }
    write_whole(path, msgspec.json.encode(document))  # an infinite number becomes null


def read_search(path: Path) -> SearchFile:
    """Read the file. Raises `ConfigError` that names it and the field."""
    document = _decode(path)
    _check_head(path, document)
    try:
        settings = msgspec.convert(document.get("settings"), SearchSettings)
        identity = msgspec.convert(document.get("identity"), dict[str, Any])
        home = msgspec.convert(document.get("home"), Home | None)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path}: settings, identity or home: {exc}") from exc
    return SearchFile(settings, identity, _result(path, document), home)


def read_result(path: Path) -> GoodputResult:
    """Read the result alone, of any version that has one. Raises `ConfigError` that names the file and the field."""
    return _result(path, _decode(path))


def _decode(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, Any])
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path}: is no result of a search: {exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ConfigError(f"{path}: is damaged or no JSON: {exc}") from exc


def _check_head(path: Path, document: Mapping[str, Any]) -> None:
    """Refuse a file of another format, or of another version of it: its settings do not mean the same."""
    form, version = document.get("format"), document.get("version")
    if form != FORMAT:
        raise ConfigError(f"{path}: format is {form!r} and not {FORMAT!r}: give a file that `pdserve bench goodput` wrote")
    if version != VERSION:
        raise ConfigError(
            f"{path}: version is {version!r}, and this release goes on with version {VERSION} alone: give another --result-file"
        )


def _result(path: Path, document: Mapping[str, Any]) -> GoodputResult:
    layouts = document.get("layouts")
    if isinstance(layouts, list):
        for layout in layouts:
            if isinstance(layout, dict) and layout.get("high_per_s", 0.0) is None:
                layout["high_per_s"] = math.inf  # JSON has no infinity
    try:
        return msgspec.convert(document, GoodputResult)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path}: is no result of a search: {exc}") from exc


def check_same(path: Path, old: SearchFile, settings: SearchSettings, identity: Mapping[str, Any]) -> None:
    """Refuse to go on with a file of another search. The error names the first field that differs."""
    before: dict[str, Any] = {"ttft": old.settings.slo.ttft_s, "tpot": old.settings.slo.tpot_s}
    now: dict[str, Any] = {"ttft": settings.slo.ttft_s, "tpot": settings.slo.tpot_s}
    for found, one in ((before, old.settings), (now, settings)):
        found |= {"attainment": one.attainment, "ranks": one.ranks, "degrees": one.degrees}
    before, now = before | old.identity, now | dict(identity)
    for name in [*now, *(one for one in before if one not in now)]:
        if before.get(name) != now.get(name):
            raise ConfigError(
                f"{path}: {name} is {before.get(name)!r} in the file and {now.get(name)!r} now: its points say nothing "
                "about this search. Give another --result-file, or remove the file"
            )
