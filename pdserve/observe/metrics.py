"""The router's Prometheus metrics. Each finished request updates counters and histograms once. The state of the cluster
is read when a page is made, so it costs nothing in between."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from pdserve.core.report import RequestRecord
from pdserve.core.worker import Role
from pdserve.observe import pool_metrics, scaling_metrics
from pdserve.observe.pool_metrics import PoolCounters
from pdserve.observe.snapshot import ClassSnapshot, ClusterSnapshot, PickSnapshot, PrefixSnapshot, WorkerSnapshot

# Metrics of classes ---------------------------------------------------------------------------------------------------
#
# The metrics of classes of requests: which targets were met, which requests were good, and which were refused.
#
# Goodput is the rate of good requests: those that finished and missed no target of their class.

ERROR_S: Final = (-2.5, -1.0, -0.5, -0.25, -0.1, -0.05, -0.02, 0.0, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_WORDS: Final = {True: "met", False: "missed", None: "none"}


class SloMetrics:
    """The counters of classes in the registry of one router."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "pdserve_slo_requests",
            "Ended requests by class and by target: met, missed, or none.",
            ["slo_class", "ttft", "tpot"],
            registry=registry,
        )
        self._good = Counter(
            "pdserve_slo_good_requests", "Requests that finished and missed no target.", ["slo_class"], registry=registry
        )
        self._refused = Counter(
            "pdserve_slo_refused_requests",
            "Requests refused at submit or shed from the queue, by class and reason.",
            ["slo_class", "reason"],
            registry=registry,
        )

        self._prediction_error = Histogram(
            "pdserve_ttft_prediction_error_seconds",
            "Measured less predicted TTFT of requests that were served in one attempt. Above 0: later than predicted.",
            ["slo_class"],
            buckets=ERROR_S,
            registry=registry,
        )

    def finished(self, record: RequestRecord) -> None:
        """Count one ended request."""
        report = record.report
        if report.predicted_ttft_s and report.output_tokens and report.attempts == 1:
            self._prediction_error.labels(report.slo_class).observe(report.ttft_s - report.predicted_ttft_s)
        if record.refusal:
            self._refused.labels(report.slo_class, record.refusal).inc()
        if record.counts:
            self._requests.labels(report.slo_class, _WORDS[report.ttft_met], _WORDS[report.tpot_met]).inc()
            if record.good:
                self._good.labels(report.slo_class).inc()

    def refused(self, slo_class: str, reason: str) -> None:
        """Count one request that was refused at submit."""
        self._refused.labels(slo_class, reason).inc()


LATENCY_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
TRANSFER_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class Metrics:
    """The metrics of one router. They have a registry of their own, so that two routers in one process stay apart."""

    def __init__(self, snapshot: Callable[[], ClusterSnapshot], model_name: str = "") -> None:
        """`model_name` is the name of the served model, a label of the metrics that have vLLM's names."""
        self._snapshot = snapshot
        self._model_name = model_name
        self._pools = PoolCounters()
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("pdserve_requests", "Finished requests.", ["outcome"], registry=registry)
        self._rejected = Counter("pdserve_requests_rejected", "Requests refused at submit.", ["reason"], registry=registry)
        self._placements = Counter("pdserve_placements", "Placed requests.", ["placement", "reason"], registry=registry)
        self._prompt_tokens = Counter("pdserve_prompt_tokens", "Prompt tokens of finished requests.", registry=registry)
        self._output_tokens = Counter("pdserve_generation_tokens", "Output tokens.", registry=registry)
        self._kv_bytes = Counter("pdserve_kv_transfer_bytes", "KV moved from prefill to decode.", registry=registry)
        self._extra_binds = Counter("pdserve_extra_binds", "Binds after the first of a request.", registry=registry)
        self._retries = Counter("pdserve_retries", "Attempts after the first, by reason.", ["reason"], registry=registry)
        self._rebinds = Counter("pdserve_rebinds", "Handoffs taken over by another decode worker.", registry=registry)
        self._migrations = Counter(
            "pdserve_migrations", "Moves of running requests off workers that were to be empty.", registry=registry
        )
        self._ignored = Counter(
            "pdserve_http_ignored_fields", "Fields of JSON bodies that no API documents.", ["endpoint"], registry=registry
        )
        self._broken = Counter("pdserve_router_invariant_failures", "Failed checks of the router.", registry=registry)
        self._policy_faults = Counter(
            "pdserve_placement_policy_faults",
            "Choices that a placement policy of the operator's own could not make.",
            ["role", "reason"],
            registry=registry,
        )
        self.slo = SloMetrics(registry)
        self._ttft = _histogram(registry, "time_to_first_token", "Arrival to token 0 leaving the router.", LATENCY_S)
        self._tpot = _histogram(registry, "time_per_output_token", "(last - first) / (tokens - 1).", TOKEN_S)
        self._total = _histogram(registry, "e2e_request_latency", "Arrival to the last token.", LATENCY_S)
        self._queue = _histogram(registry, "request_queue_time", "Arrival to the first bind that had room.", LATENCY_S)
        self._transfer = _histogram(registry, "kv_transfer", "First read posted to last read finished.", TRANSFER_S)
        self._exposed = _histogram(registry, "kv_transfer_exposed", "Prefill known done to KV usable.", TRANSFER_S)

    def finished(self, record: RequestRecord) -> None:
        """Count one finished request."""
        report = record.report
        self._requests.labels(record.outcome).inc()
        self.slo.finished(record)
        self._prompt_tokens.inc(report.prompt_tokens)
        self._output_tokens.inc(report.output_tokens)
        for reason in report.retry_reasons:
            self._retries.labels(reason).inc()
        self._rebinds.inc(report.rebinds)
        self._migrations.inc(report.migrations)
        if report.placement_reason:
            self._placements.labels(report.placement.value, report.placement_reason).inc()
            self._extra_binds.inc(max(0, report.binds - 1))
            self._queue.observe(report.queue_s)
        if report.output_tokens > 0:
            self._ttft.observe(report.ttft_s)
        if report.output_tokens > 1:
            self._tpot.observe(report.tpot_s)
        if not record.message:
            self._total.observe(report.total_s)
        if report.kv_bytes > 0:
            self._kv_bytes.inc(report.kv_bytes)
            self._transfer.observe(report.transfer_s)
            self._exposed.observe(report.exposed_transfer_s)

    def rejected(self, reason: str) -> None:
        """Count one request that was refused at submit. `reason` is an error code."""
        self._rejected.labels(reason).inc()

    def ignored_fields(self, endpoint: str, count: int) -> None:
        """Count fields of one body that were left out."""
        self._ignored.labels(endpoint).inc(count)

    def invariant_broken(self) -> None:
        """Count one failed check of the router's invariants."""
        self._broken.inc()

    def policy_fault(self, role: str, reason: str) -> None:
        """Count one choice that the built-in policy made, because the pool's own policy raised or returned no number."""
        self._policy_faults.labels(role, reason).inc()

    def render(self) -> bytes:
        """Return all metrics of this moment in the text format of Prometheus, with every worker."""
        return self.page(self._snapshot(), per_worker=True)

    def page(self, cluster: ClusterSnapshot, per_worker: bool) -> bytes:
        """Return all metrics and those of a snapshot in the text format of Prometheus. Without `per_worker`, the workers are
        shown by pool alone. One thread at a time may call it, which need not be that of the loop."""
        self._pools.add(cluster.workers)
        state = _Families(
            [*_cluster(cluster), *self._pools.collect(self._model_name), *(_workers(cluster) if per_worker else ())]
        )
        return generate_latest(state) + generate_latest(self._registry)


def _histogram(registry: CollectorRegistry, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
    return Histogram(f"pdserve_{name}_seconds", text, buckets=buckets, registry=registry)


class _Families(CollectorRegistry):
    """Metrics that were made for one page."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _cluster(cluster: ClusterSnapshot) -> Iterator[Metric]:
    waiting, running = cluster.queued_requests, cluster.running_requests
    yield GaugeMetricFamily("pdserve_num_requests_waiting", "Requests that wait for room on decode.", value=waiting)
    yield GaugeMetricFamily("pdserve_num_requests_running", "Requests placed on workers.", value=running)
    aside = cluster.num_set_aside
    yield GaugeMetricFamily("pdserve_pairs_set_aside", "Pairs of workers between which KV did not pass.", value=aside)
    yield from _ejections(cluster)
    yield from scaling_metrics.demand(cluster.demand)
    yield from scaling_metrics.pools(cluster.workers)
    yield from pool_metrics.gauges(cluster.workers)
    yield from _prefixes(cluster.prefixes)
    yield _picks(cluster.picks)
    bound = CounterMetricFamily(
        "pdserve_limit_bound", "Connections and requests refused, or blocks forgotten, by the limit.", labels=["limit"]
    )
    values = GaugeMetricFamily("pdserve_limit", "The limit that holds now: streams, requests or bytes.", labels=["limit"])
    for limit in cluster.limits:
        bound.add_metric([limit.name], limit.bound)
        values.add_metric([limit.name], limit.value)
    yield from (bound, values)


def _workers(cluster: ClusterSnapshot) -> Iterator[Metric]:
    yield from scaling_metrics.utilisation(cluster.workers)
    yield _blocks(cluster.workers)
    yield from _experts(cluster.workers)
    drafting = [
        ((worker.hello.worker_id, worker.hello.role.value), worker.load.speculation)
        for worker in cluster.workers
        if worker.load.speculation is not None
    ]
    yield from pool_metrics.drafts("pdserve_worker_spec_decode_", ("worker", "role"), drafting)
    for name, text, read in _WORKER_GAUGES:
        family = GaugeMetricFamily(f"pdserve_worker_{name}", text, labels=["worker", "role"])
        for worker in cluster.workers:
            family.add_metric([worker.hello.worker_id, worker.hello.role.value], read(worker))
        yield family
    for name, text, count in _WORKER_COUNTERS:
        counter = CounterMetricFamily(f"pdserve_{name}", text, labels=["worker", "role"])
        for worker in cluster.workers:
            counter.add_metric([worker.hello.worker_id, worker.hello.role.value], count(worker))
        yield counter


_WORKER_COUNTERS: Final[tuple[tuple[str, str, Callable[[WorkerSnapshot], float]], ...]] = (
    ("kv_corrupt_blocks", "Lent blocks that were not read as they were written.", lambda w: w.load.kv_corrupt_blocks),
    ("kv_rotted_blocks", "Lent blocks that had changed in the worker's memory.", lambda w: w.load.kv_rotted_blocks),
    ("worker_computed_prompt_tokens", "Prompt tokens that the engine computed.", lambda w: w.load.computed_prompt_tokens),
    ("worker_output_tokens", "Tokens that the engine drew.", lambda w: w.load.output_tokens),
    ("worker_prompt_busy_seconds", "Time of steps that computed prompts.", lambda w: w.load.prompt_busy_s),
    ("worker_decode_busy_seconds", "Time of all other steps.", lambda w: w.load.decode_busy_s),
    ("worker_prompt_flops", "Operations of steps that computed prompts.", lambda w: w.load.prompt_flops),
    ("worker_decode_read_bytes", "Bytes of weights and KV that all other steps read.", lambda w: w.load.decode_read_bytes),
)


_WORKER_GAUGES: Final[tuple[tuple[str, str, Callable[[WorkerSnapshot], float]], ...]] = (
    ("ready", "1: the worker takes requests.", lambda w: float(w.ready)),
    ("draining", "1: the worker takes nothing new and leaves when it is done.", lambda w: float(w.draining)),
    ("link_version", "The newest version of the link's protocol that the worker speaks.", lambda w: w.hello.link_version),
    (
        "peer_version",
        "The newest version of the protocol between workers that the worker speaks.",
        lambda w: w.hello.peer_version,
    ),
    ("queued_requests", "Requests that wait inside the worker.", lambda w: w.load.queued_requests),
    ("queued_tokens", "Prompt tokens not yet computed.", lambda w: w.load.queued_tokens),
    ("running_sequences", "Sequences in the engine.", lambda w: w.load.running_sequences),
    ("prefix_queried_tokens", "Tokens of sequences that got their blocks.", lambda w: w.load.prefix_queried_tokens),
    ("prefix_hit_tokens", "Those of prefix_queried_tokens whose KV was cached.", lambda w: w.load.prefix_hit_tokens),
    ("leases_held", "Leases over lent blocks.", lambda w: w.load.leases_held),
    ("requests_placed", "Requests that this router placed and that have not ended.", lambda w: w.requests_placed),
    ("heartbeat_age_seconds", "Time since the worker's last message.", lambda w: w.heartbeat_age_s),
    ("engine_stalled_seconds", "Time without a step of the engine while work waits.", lambda w: w.load.engine_stalled_s),
    (
        "numerical_errors",
        "Sequences whose logits were not finite, since the worker's start.",
        lambda w: w.load.numerical_errors,
    ),
    ("loop_lag_ms", "Delay of the worker's event loop.", lambda w: w.load.loop_lag_ms),
)


def _prefixes(prefixes: PrefixSnapshot) -> Iterator[Metric]:
    yield GaugeMetricFamily("pdserve_prefix_keys", "Blocks that the index of held prefixes names.", value=prefixes.keys)
    yield GaugeMetricFamily("pdserve_prefix_index_bytes", "Memory of that index, estimated.", value=prefixes.index_bytes)
    yield CounterMetricFamily("pdserve_prefix_keys_evicted", "Blocks that the full index forgot.", value=prefixes.evicted)
    yield CounterMetricFamily("pdserve_prefix_resyncs", "Workers asked for all their blocks.", value=prefixes.resyncs)
    predicted = CounterMetricFamily(
        "pdserve_prefix_predicted_tokens", "Prompt tokens that picked workers probably held.", labels=["role"]
    )
    for role, tokens in prefixes.predicted_tokens:
        predicted.add_metric([role.value], tokens)
    yield predicted


def _picks(picks: tuple[PickSnapshot, ...]) -> CounterMetricFamily:
    family = CounterMetricFamily("pdserve_picks", "Workers picked, by policy and reason.", labels=["role", "policy", "reason"])
    for pick in picks:
        family.add_metric([pick.role.value, pick.policy, pick.reason], pick.count)
    return family


def _ejections(cluster: ClusterSnapshot) -> Iterator[Metric]:
    now = GaugeMetricFamily("pdserve_ejected_workers", "Workers that are ejected from their pool now.", labels=["role"])
    for role in Role:
        now.add_metric([role.value], sum(worker.ejected for worker in cluster.workers if worker.hello.role is role))
    yield now
    counts = CounterMetricFamily("pdserve_ejections", "Workers ejected from their pool.", labels=["role", "cause"])
    for ejection in cluster.ejections:
        counts.add_metric([ejection.role.value, ejection.cause], ejection.count)
    yield counts


def _blocks(workers: tuple[WorkerSnapshot, ...]) -> GaugeMetricFamily:
    family = GaugeMetricFamily("pdserve_worker_blocks", "KV blocks by state.", labels=["worker", "role", "state"])
    for worker in workers:
        for state in ("free", "cached", "held", "quarantined", "unaccounted"):
            family.add_metric([worker.hello.worker_id, worker.hello.role.value, state], getattr(worker.load.blocks, state))
    return family


def _experts(workers: tuple[WorkerSnapshot, ...]) -> Iterator[GaugeMetricFamily]:
    """Yield the spread over experts of the workers that have some. The experts themselves are in `GetClusterState` alone."""
    text = "Tokens of a layer's hottest expert over the mean of its experts, since the worker's start: "
    labels = ["worker", "role"]
    mean = GaugeMetricFamily("pdserve_worker_expert_imbalance", text + "the mean over layers.", labels=labels)
    worst = GaugeMetricFamily("pdserve_worker_expert_worst_imbalance", text + "the worst layer.", labels=labels)
    for worker in workers:
        if worker.load.experts is not None:
            mean.add_metric([worker.hello.worker_id, worker.hello.role.value], worker.load.experts.imbalance)
            worst.add_metric([worker.hello.worker_id, worker.hello.role.value], worker.load.experts.worst_imbalance)
    yield from (mean, worst)


# Attainment in the last minutes ---------------------------------------------------------------------------------------
#
# The attainment of targets by class in the last minutes. Pure: times are passed in.
#
# Counts are kept in buckets of `BUCKET_S`, of which the last `BUCKETS` are shown, so what is remembered is bounded.


BUCKET_S: Final = 10.0
BUCKETS: Final = 30
WINDOW_S: Final = BUCKET_S * BUCKETS
"""Five minutes: long enough for a rate of rare misses, and short enough to show that a change helped."""


@dataclass(slots=True)
class _Bucket:
    number: int
    classes: dict[str, ClassSnapshot] = field(default_factory=dict)


class Attainment:
    """Counts ended and refused requests by class. There are as many classes as the router's settings name."""

    def __init__(self) -> None:
        self._buckets: deque[_Bucket] = deque(maxlen=BUCKETS)

    def finished(self, record: RequestRecord, now_s: float) -> None:
        """Count one ended request. A request that was shed has also ended."""
        report = record.report
        one = self._of(report.slo_class, now_s)
        if record.refusal:
            one.shed += 1
        if record.counts:
            one.requests += 1
            one.good += record.good
            one.ttft_met += report.ttft_met is True
            one.ttft_missed += report.ttft_met is False
            one.tpot_met += report.tpot_met is True
            one.tpot_missed += report.tpot_met is False

    def refused(self, slo_class: str, now_s: float) -> None:
        """Count one request that was refused at submit."""
        self._of(slo_class, now_s).refused += 1

    def classes(self, now_s: float) -> tuple[ClassSnapshot, ...]:
        """Return the sums of the last `WINDOW_S` by class, in the order of the names."""
        oldest = _number(now_s) - BUCKETS
        sums: dict[str, ClassSnapshot] = {}
        for bucket in self._buckets:
            if bucket.number > oldest:
                for name, one in bucket.classes.items():
                    sums.setdefault(name, ClassSnapshot(name)).add(one)
        return tuple(sums[name] for name in sorted(sums))

    def _of(self, slo_class: str, now_s: float) -> ClassSnapshot:
        number = _number(now_s)
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(_Bucket(number))
        return self._buckets[-1].classes.setdefault(slo_class, ClassSnapshot(slo_class))


def _number(now_s: float) -> int:
    return int(now_s // BUCKET_S)
