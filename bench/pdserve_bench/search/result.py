"""The result of a search for goodput: a verdict is made of it, and a search resumes by its file. Pure.

Rates are requests a second of the whole cluster; `rate / workers` is the goodput of one worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve_bench.layout import Layout, Slo


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
