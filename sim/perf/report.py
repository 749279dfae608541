"""The results of a simulated run: how each request was served, what it cost, and how busy each worker was."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pdserve.core.report import Report
from pdserve.core.slo import SloClass
from pdserve.planner.limits import PoolSizes
from pdserve.planner.observations import Observations


@dataclass(frozen=True, slots=True)
class SimServed:
    """One request and its end. `error` is the code of the error that ended it; empty for a finished request."""

    request_id: str
    slo: SloClass
    arrived_s: float
    ended_s: float
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens that were computed for it, on all workers together. Recomputed output of a preempted sequence counts."""
    report: Report
    error: str = ""

    @property
    def attained(self) -> bool:
        """True when the request has finished within the targets of its class."""
        slo, report = self.slo, self.report
        in_time = slo.ttft_s is None or report.ttft_s <= slo.ttft_s
        return not self.error and in_time and (slo.tpot_s is None or report.tpot_s <= slo.tpot_s)

    @property
    def wait_s(self) -> float:
        """The time from arrival until the first bind that found room."""
        return self.report.queue_s


@dataclass(frozen=True, slots=True)
class Used:
    """One worker and its use."""

    worker_id: str
    steps: int
    busy_s: float
    prefix_queried_tokens: int
    prefix_hit_tokens: int


@dataclass(slots=True)
class SimReport:
    """All requests of a run, in the order of their ends, and all workers."""

    served: list[SimServed] = field(default_factory=list)
    workers: list[Used] = field(default_factory=list)
    span_s: float = 0.0
    """The virtual time from the first arrival to the last end."""
    refused: int = 0
    """Requests that the router refused at their arrival. They are among `served` too."""

    @property
    def prompt_tokens(self) -> int:
        """All tokens of the prompts of requests that have finished."""
        return sum(one.prompt_tokens for one in self.finished)

    @property
    def computed_tokens(self) -> int:
        """All prompt tokens that were computed."""
        return sum(one.computed_tokens for one in self.served)

    @property
    def finished(self) -> list[SimServed]:
        """The requests that ended without an error."""
        return [one for one in self.served if not one.error]

    @property
    def hit_share(self) -> float:
        """The share of the prompt tokens of finished requests that was not computed."""
        return 1.0 - sum(one.computed_tokens for one in self.finished) / max(1, self.prompt_tokens)

    @property
    def goodput(self) -> float:
        """Requests within their targets a second and worker."""
        return sum(one.attained for one in self.served) / (self.span_s * len(self.workers))

    def attainment(self) -> dict[str, float]:
        """Return the share of requests of each class that met its targets."""
        names = sorted({one.slo.name for one in self.served})
        by_class = {name: [one.attained for one in self.served if one.slo.name == name] for name in names}
        return {name: sum(met) / len(met) for name, met in by_class.items()}

    def quantile(self, value: Callable[[SimServed], float], share: float) -> float:
        """Return the quantile of a value over the finished requests. 0 when there is none."""
        return quantile([value(one) for one in self.finished], share)

    def ttft_s(self, share: float) -> float:
        """Return a quantile of TTFT."""
        return self.quantile(lambda one: one.report.ttft_s, share)

    def tpot_s(self, share: float) -> float:
        """Return a quantile of TPOT."""
        return self.quantile(lambda one: one.report.tpot_s, share)


@dataclass(frozen=True, slots=True)
class PoolsAt:
    """The pools at one look of a controller."""

    observed: Observations
    wanted: PoolSizes | None
    """The sizes that the controller has asked for. None: it left them as they were."""
    members: int
    """The processes that are paid for."""


@dataclass(slots=True)
class ElasticReport:
    """The changes of the pools in one run, and the cost of their processes."""

    history: list[PoolsAt] = field(default_factory=list)
    flips: int = 0
    worker_s: float = 0.0
    """The time of all processes from their orders until they had gone, or until the last request ended."""


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that at least this share of the values does not exceed. 0 for no values."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else 0.0
