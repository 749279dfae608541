"""The metrics that an autoscaler reads: the load that clients bring, and each pool as a whole. docs/autoscaling.md lists them.

A value that nobody knows is left out, so that nobody takes it for 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pdserve.core.roofline import computed_tokens
from pdserve.core.slo import DemandCounts
from pdserve.core.worker import Role, WorkerLoad
from pdserve.observe.snapshot import WorkerSnapshot

_COUNTERS: Final = {
    "requests": "Requests that were admitted.",
    "prompt_tokens": "Prompt tokens of the requests that were admitted.",
    "output_tokens": "Tokens that were sent to clients.",
    "placed_prompt_tokens": "Prompt tokens that some worker began to compute, or had cached.",
    "prefill_prompt_tokens": "Those of placed_prompt_tokens that prefill workers got.",
    "refused": "Requests that were refused at once because of the load.",
    "ttft_met": "Ended requests that met their target for the first token.",
    "ttft_missed": "Ended requests that missed their target for the first token.",
    "tpot_met": "Ended requests that met their target for the time between tokens.",
    "tpot_missed": "Ended requests that missed their target for the time between tokens.",
}

_CAUSES: Final = {
    "queue": ("late_by_queue",),
    "prefill_queue": ("late_by_prefill_queue",),
    "prefill": ("late_by_prefill",),
    "colocated": ("late_by_colocated",),
    "transfer": ("slow_by_transfer",),
    "first_decode": ("slow_by_first_decode",),
    "steps": ("slow_by_steps",),
    "failure": ("late_by_failure", "slow_by_failure"),
}
"""The counts of `ClassDemand` behind each cause of a missed target. A request that missed both targets counts twice."""


def demand(counts: DemandCounts) -> Iterator[Metric]:
    """Yield the metrics of the load. One alone has labels: the cause of missed targets, by class."""
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"pdserve_demand_{name}", text, value=getattr(counts, name))
    missed = CounterMetricFamily(
        "pdserve_demand_missed", "Missed targets by what took most of the time.", labels=["slo_class", "cause"]
    )
    for one in counts.classes:
        for cause, names in _CAUSES.items():
            missed.add_metric([one.slo_class, cause], sum(getattr(one, name) for name in names))
    yield missed
    queued, wait_s = counts.queued_prompt_tokens, counts.longest_wait_s
    yield GaugeMetricFamily("pdserve_queued_prompt_tokens", "Prompt tokens that wait in the router.", value=queued)
    yield GaugeMetricFamily("pdserve_longest_wait_seconds", "Time that the first request has waited.", value=wait_s)


Ready = Sequence[WorkerSnapshot]


def _busy(ready: Ready) -> float | None:
    shares = [share for one in ready if (share := one.recent.busy) is not None]
    return sum(shares) / len(shares) if shares else None


def _busy_rate(ready: Ready) -> float | None:
    """Return the tokens that one worker computes in a second in which its engine is busy."""
    spans = [(one, one.before, one.load) for one in ready if one.recent.busy is not None]
    tokens = sum(computed_tokens(one.hello.role, new) - computed_tokens(one.hello.role, old) for one, old, new in spans)
    busy_s = sum(_busy_s(new) - _busy_s(old) for _, old, new in spans)
    return tokens / busy_s if busy_s > 0.0 and tokens >= 0 else None


def _busy_s(load: WorkerLoad) -> float:
    return load.prompt_busy_s + load.decode_busy_s


def _kv_used(ready: Ready) -> float | None:
    total = sum(one.load.blocks.total for one in ready)
    return sum(one.load.blocks.held + one.load.blocks.quarantined for one in ready) / total if total else None


_POOL: Final[tuple[tuple[str, str, Callable[[Ready], float | None]], ...]] = (
    ("workers_ready", "Workers that take requests.", len),
    ("utilisation", "Share of the last seconds in which engines were busy, as a mean.", _busy),
    ("busy_tokens_per_second", "Tokens of a second in which one engine is busy.", _busy_rate),
    ("queued_tokens", "Prompt tokens that wait on the workers.", lambda ready: sum(one.load.queued_tokens for one in ready)),
    ("running_sequences", "Sequences in the engines.", lambda ready: sum(one.load.running_sequences for one in ready)),
    ("kv_used", "Share of the KV blocks that are held.", _kv_used),
)


def pools(workers: Sequence[WorkerSnapshot]) -> Iterator[Metric]:
    """Yield the metrics of both pools. Those of a pool concern its ready workers; the one label is the role."""
    ready = {role: [one for one in workers if one.hello.role is role and one.ready and not one.draining] for role in Role}
    for name, text, read in _POOL:
        family = GaugeMetricFamily(f"pdserve_pool_{name}", text, labels=["role"])
        for role, found in ready.items():
            _add(family, [role.value], read(found))
        yield family
    linked = GaugeMetricFamily("pdserve_pool_workers", "Workers that are linked to the router.", labels=["role"])
    for role in Role:
        linked.add_metric([role.value], sum(one.hello.role is role for one in workers))
    yield linked


_UTILISATION: Final = {
    "busy": "Share of the last seconds in which the engine made steps.",
    "mfu": "Share of the device's peak of operations that steps with prompts reached in the last seconds.",
    "mbu": "Share of the device's peak of memory reads that other steps reached in the last seconds.",
}


def utilisation(workers: Sequence[WorkerSnapshot]) -> Iterator[Metric]:
    """Yield the utilisation of each worker."""
    recent = [([one.hello.worker_id, one.hello.role.value], one.recent) for one in workers]
    for name, text in _UTILISATION.items():
        family = GaugeMetricFamily(f"pdserve_worker_{name}", text, labels=["worker", "role"])
        for labels, one in recent:
            _add(family, labels, getattr(one, name))
        yield family


def _add(family: GaugeMetricFamily, labels: Sequence[str], value: float | None) -> None:
    if value is not None:
        family.add_metric(labels, value)
