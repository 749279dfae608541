"""The cluster at one moment, as the router knows it: what metrics and `GetClusterState` show."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.blocks import BlockCounts


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
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


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    router_incarnation: int
    queued_requests: int
    running_requests: int
    workers: tuple[WorkerSnapshot, ...]
