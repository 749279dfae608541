"""The state of the cluster at one moment, as the router knows it. Metrics and `GetClusterState` show it."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.blocks import BlockCounts


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The state of one worker."""

    worker_id: str
    role: str  # prefill | decode
    incarnation: int
    address: str
    ready: bool
    blocks: BlockCounts
    queued_requests: int
    queued_tokens: int
    running_sequences: int
    leases_held: int
    heartbeat_age_s: float
    requests_placed: int
    loop_lag_ms: float
    pid: int
    draining: bool = False
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    kv_corrupt_blocks: int = 0
    kv_rotted_blocks: int = 0
    not_ready_reason: str = ""  # empty: the worker is ready
    engine_stalled_s: float = 0.0  # time without a step while work waits
    numerical_errors: int = 0  # sequences whose logits were not finite numbers, since the worker's start
    niceness: int = 0  # niceness of the worker's process
    quantization: str = ""  # quantisation of the worker's weights; empty: none


@dataclass(frozen=True, slots=True)
class PairSnapshot:
    """Two workers between which KV did not pass. `remaining_s` is infinite when they will never be paired again."""

    prefill_worker: str
    decode_worker: str
    reason: str
    remaining_s: float
    failures: int


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """The state of the router, its workers, and the pairs of workers that are set aside."""

    router_incarnation: int
    queued_requests: int
    running_requests: int
    workers: tuple[WorkerSnapshot, ...]
    set_aside: tuple[PairSnapshot, ...] = ()
    exact: bool = True  # all workers store weights and KV in the same formats
