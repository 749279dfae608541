"""The router's metrics, in a registry of their own. Level state is read at scrape time from a snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily

from pdserve.core.blocks import BlockCounts

LATENCY_BUCKETS_S: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKEN_BUCKETS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2)
TRANSFER_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)


@dataclass(frozen=True, slots=True)
class WorkerGauges:
    worker_id: str
    role: str
    blocks: BlockCounts
    queued_requests: int
    running_sequences: int
    leases_held: int
    loop_lag_ms: float


@dataclass(frozen=True, slots=True)
class Gauges:
    """The router's level state."""

    waiting_requests: int
    running_requests: int
    workers: tuple[WorkerGauges, ...]


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What one ended request adds. `outcome` is "ok" or the error's code."""

    outcome: str
    placement: str
    placement_reason: str
    prompt_tokens: int
    output_tokens: int
    kv_bytes: int
    queue_s: float
    ttft_s: float
    tpot_s: float
    total_s: float
    exposed_transfer_s: float


class RouterMetrics:
    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_LevelState(gauges))
        self._requests = Counter("pdserve_requests", "Ended requests", ["outcome"], registry=registry)
        self._placements = Counter("pdserve_placements", "Placement decisions", ["placement", "reason"], registry=registry)
        self._prompt_tokens = Counter("pdserve_prompt_tokens", "Prompt tokens of ended requests", registry=registry)
        self._output_tokens = Counter("pdserve_generation_tokens", "Output tokens of ended requests", registry=registry)
        self._kv_bytes = Counter("pdserve_kv_transfer_bytes", "KV bytes moved between workers", registry=registry)
        self._queue_s = _histogram("pdserve_request_queue_time_seconds", "Arrival to bind", LATENCY_BUCKETS_S, registry)
        self._ttft_s = _histogram("pdserve_time_to_first_token_seconds", "Arrival to token 0", LATENCY_BUCKETS_S, registry)
        self._tpot_s = _histogram("pdserve_time_per_output_token_seconds", "Mean gap of a request", TOKEN_BUCKETS_S, registry)
        self._total_s = _histogram("pdserve_e2e_request_latency_seconds", "Arrival to last token", LATENCY_BUCKETS_S, registry)
        self._exposed_s = _histogram(
            "pdserve_kv_transfer_exposed_seconds", "Prefill known done to KV usable on decode", TRANSFER_BUCKETS_S, registry
        )

    def saw(self, request: FinishedRequest) -> None:
        self._requests.labels(request.outcome).inc()
        if request.placement_reason:
            self._placements.labels(request.placement, request.placement_reason).inc()
        self._prompt_tokens.inc(request.prompt_tokens)
        self._output_tokens.inc(request.output_tokens)
        if request.outcome != "ok":
            return
        self._queue_s.observe(request.queue_s)
        self._ttft_s.observe(request.ttft_s)
        self._total_s.observe(request.total_s)
        if request.output_tokens > 1:
            self._tpot_s.observe(request.tpot_s)
        if request.kv_bytes:
            self._kv_bytes.inc(request.kv_bytes)
            self._exposed_s.observe(request.exposed_transfer_s)

    def text(self) -> bytes:
        """Prometheus text exposition, version 0.0.4."""
        return generate_latest(self._registry)


def _histogram(name: str, text: str, buckets: Iterable[float], registry: CollectorRegistry) -> Histogram:
    return Histogram(name, text, buckets=tuple(buckets), registry=registry)


class _LevelState:
    def __init__(self, gauges: Callable[[], Gauges]) -> None:
        self._gauges = gauges

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Nothing: the registry would otherwise collect at registration, before there is a state."""
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        gauges = self._gauges()
        yield GaugeMetricFamily("pdserve_requests_waiting", "Requests without a worker", gauges.waiting_requests)
        yield GaugeMetricFamily("pdserve_requests_running", "Requests on workers", gauges.running_requests)
        blocks = GaugeMetricFamily("pdserve_kv_blocks", "KV blocks by state", labels=["worker", "role", "state"])
        state = GaugeMetricFamily("pdserve_worker", "A worker's level state", labels=["worker", "role", "what"])
        for worker in gauges.workers:
            labels = [worker.worker_id, worker.role]
            for name in ("free", "cached", "held", "quarantined", "unaccounted"):
                blocks.add_metric([*labels, name], getattr(worker.blocks, name))
            for name in ("queued_requests", "running_sequences", "leases_held", "loop_lag_ms"):
                state.add_metric([*labels, name], getattr(worker, name))
        yield blocks
        yield state
