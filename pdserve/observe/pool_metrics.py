"""Each pool's workers as one series: sums, means and extremes of what the workers tell. /metrics has these by default, since a
page with every worker of a large cluster has megabytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pdserve.core.ids import Incarnation
from pdserve.core.speculation import NO_COUNTS, DraftCounts
from pdserve.core.worker import Role, WorkerHello, WorkerLoad
from pdserve.observe.snapshot import WorkerSnapshot

COUNTERS: Final[tuple[tuple[str, str, Callable[[WorkerLoad], float]], ...]] = (
    ("kv_corrupt_blocks", "Lent blocks that were not read as they were written.", lambda load: load.kv_corrupt_blocks),
    ("kv_rotted_blocks", "Lent blocks that had changed in the worker's memory.", lambda load: load.kv_rotted_blocks),
    ("computed_prompt_tokens", "Prompt tokens that the engines computed.", lambda load: load.computed_prompt_tokens),
    ("output_tokens", "Tokens that the engines drew.", lambda load: load.output_tokens),
    ("prompt_busy_seconds", "Time of steps that computed prompts.", lambda load: load.prompt_busy_s),
    ("decode_busy_seconds", "Time of all other steps.", lambda load: load.decode_busy_s),
    ("prompt_flops", "Operations of steps that computed prompts.", lambda load: load.prompt_flops),
    ("decode_read_bytes", "Bytes of weights and KV that all other steps read.", lambda load: load.decode_read_bytes),
    ("prefix_queried_tokens", "Tokens of sequences that got their blocks.", lambda load: load.prefix_queried_tokens),
    ("prefix_hit_tokens", "Those of prefix_queried_tokens whose KV was cached.", lambda load: load.prefix_hit_tokens),
    ("numerical_errors", "Sequences whose logits were not finite.", lambda load: load.numerical_errors),
)
"""What workers count from their start: name, explanation, value."""

_DRAFTS: Final = {
    "num_drafts": "Proposals of one draft token or several that steps verified.",
    "num_draft_tokens": "Their draft tokens.",
    "num_accepted_tokens": "The draft tokens that were right.",
}

KEPT_AWAY: Final = 4096
"""So many workers that are not linked are remembered, with 0.3 KiB each, and 1 KiB if they draft. A forgotten
worker counts from 0 if it returns."""

Reduce = Callable[[Iterable[float]], float]
_GAUGES: Final[tuple[tuple[str, str, Reduce, Callable[[WorkerSnapshot], float]], ...]] = (
    ("workers_draining", "Workers that take nothing new and leave when they are done.", sum, lambda one: one.draining),
    (
        "link_version",
        "The oldest of the workers' newest versions of the link's protocol.",
        min,
        lambda one: one.hello.link_version,
    ),
    ("peer_version", "The same of the protocol between workers.", min, lambda one: one.hello.peer_version),
    ("ranks", "Processes that compute; a worker that is no gang has one.", sum, lambda one: one.hello.degrees.ranks),
    ("cores", "Threads of all ranks on CPUs.", sum, lambda one: one.hello.cores),
    ("queued_requests", "Requests that wait inside the workers.", sum, lambda one: one.load.queued_requests),
    ("leases_held", "Leases over lent blocks.", sum, lambda one: one.load.leases_held),
    ("requests_placed", "Requests that this router placed and that have not ended.", sum, lambda one: one.requests_placed),
    ("heartbeat_age_seconds", "Longest time since a worker's last message.", max, lambda one: one.heartbeat_age_s),
    ("engine_stalled_seconds", "Longest time without a step while work waits.", max, lambda one: one.load.engine_stalled_s),
    ("loop_lag_ms", "Largest delay of a worker's event loop.", max, lambda one: one.load.loop_lag_ms),
)
_STATES: Final = ("free", "cached", "held", "quarantined", "unaccounted")


class PoolCounters:
    """The counters of pools. A worker that leaves takes nothing back: a sum that fell would look like a restart to Prometheus,
    and the whole sum like new work."""

    def __init__(self) -> None:
        self._seen: dict[Incarnation, list[float]] = {}
        """The most that each worker has counted so far, those that were linked last at the end."""
        self._drafted: dict[Incarnation, DraftCounts] = {}
        """The same of the drafts of those workers that draft."""
        self._totals = {role: [0.0] * len(COUNTERS) for role in Role}
        self._drafts: dict[Role, DraftCounts] = {}
        """The drafts of each pool that has had a worker that drafts."""

    def add(self, workers: Sequence[WorkerSnapshot]) -> None:
        """Add what the workers have counted since the last call. What one counts after its last call is not added. A worker
        that comes back as the same process goes on from what it had counted; its first load after that says 0."""
        for worker in workers:
            most = self._seen.pop(worker.hello.incarnation, None) or [0.0] * len(COUNTERS)
            self._seen[worker.hello.incarnation] = most
            totals = self._totals[worker.hello.role]
            for place, (_, _, read) in enumerate(COUNTERS):
                new = max(0.0, read(worker.load) - most[place])
                most[place] += new
                totals[place] += new
            if worker.load.speculation is not None:
                self._draft(worker.hello, worker.load.speculation)
        for incarnation in list(self._seen)[: max(0, len(self._seen) - len(workers) - KEPT_AWAY)]:
            del self._seen[incarnation]
            self._drafted.pop(incarnation, None)

    def _draft(self, hello: WorkerHello, counts: DraftCounts) -> None:
        most = self._drafted.get(hello.incarnation, NO_COUNTS)
        new = counts.since(most)
        self._drafted[hello.incarnation] = most.plus(new)
        self._drafts[hello.role] = self._drafts.get(hello.role, NO_COUNTS).plus(new)

    def collect(self, model_name: str) -> Iterator[Metric]:
        """Yield the counters. `model_name` is the name of the served model."""
        pools = [((model_name, role.value), counts) for role, counts in self._drafts.items()]
        yield from drafts("vllm:spec_decode_", ("model_name", "engine"), pools)
        for place, (name, text, _) in enumerate(COUNTERS):
            family = CounterMetricFamily(f"pdserve_pool_{name}", text, labels=["role"])
            for role, totals in self._totals.items():
                family.add_metric([role.value], totals[place])
            yield family


def drafts(
    prefix: str, labels: tuple[str, ...], drafting: Sequence[tuple[tuple[str, ...], DraftCounts]]
) -> Iterator[CounterMetricFamily]:
    """Yield the counters of drafts, with vLLM's names after `prefix`. `drafting` has the values of the labels and the counts of
    each worker or pool that drafts. If there is none, there are no counters, as in vLLM."""
    if not drafting:
        return
    for name, text in _DRAFTS.items():
        family = CounterMetricFamily(prefix + name, text, labels=labels)
        for values, counts in drafting:
            family.add_metric(values, getattr(counts, name))
        yield family
    text = "Drafts that were right, by their place in the proposal."
    by_place = CounterMetricFamily(f"{prefix}num_accepted_tokens_per_pos", text, labels=(*labels, "position"))
    for values, counts in drafting:
        for place, accepted in enumerate(counts.num_accepted_tokens_per_pos):
            by_place.add_metric((*values, str(place)), accepted)
    yield by_place


def gauges(workers: Sequence[WorkerSnapshot]) -> Iterator[Metric]:
    """Yield sums and extremes over all linked workers of each pool. A pool without workers has no value."""
    pools = {role: found for role in Role if (found := [one for one in workers if one.hello.role is role])}
    for name, text, reduce, read in _GAUGES:
        family = GaugeMetricFamily(f"pdserve_pool_{name}", text, labels=["role"])
        for role, found in pools.items():
            family.add_metric([role.value], float(reduce([read(one) for one in found])))
        yield family
    blocks = GaugeMetricFamily("pdserve_pool_blocks", "KV blocks by state.", labels=["role", "state"])
    for role, found in pools.items():
        for state in _STATES:
            blocks.add_metric([role.value, state], sum(getattr(one.load.blocks, state) for one in found))
    yield blocks
    sets = GaugeMetricFamily(
        "pdserve_pool_workers_by_isa", "Workers by the instruction set of their compiled steps.", labels=["role", "isa"]
    )
    for role, found in pools.items():
        for isa, count in sorted(Counter(one.hello.isa or "none" for one in found).items()):
            sets.add_metric([role.value, isa], count)
    yield sets
    yield from _means(pools)


def _means(pools: dict[Role, list[WorkerSnapshot]]) -> Iterator[Metric]:
    """Yield the means over the workers that know the value."""
    told: dict[str, tuple[str, Callable[[WorkerSnapshot], float | None]]] = {
        "mfu": ("Share of the devices' peak of operations that steps with prompts reached.", lambda one: one.recent.mfu),
        "mbu": ("Share of the devices' peak of memory reads that other steps reached.", lambda one: one.recent.mbu),
        "expert_imbalance": (
            "Tokens of a layer's hottest expert over the mean of its experts, as a mean over layers and workers.",
            lambda one: None if one.load.experts is None else one.load.experts.imbalance,
        ),
    }
    for name, (text, read) in told.items():
        family = GaugeMetricFamily(f"pdserve_pool_{name}", text, labels=["role"])
        for role, found in pools.items():
            values = [value for one in found if (value := read(one)) is not None]
            if values:
                family.add_metric([role.value], sum(values) / len(values))
        yield family
