"""The state of the cluster at one moment, as the router knows it. Metrics and `GetClusterState` show it."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.core.worker import WorkerHello, WorkerLoad


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """The state of one worker."""

    hello: WorkerHello
    load: WorkerLoad
    heartbeat_age_s: float
    requests_placed: int
    """The requests that this router placed and that have not finished."""
    draining: bool = False
    """The router places nothing more on the worker."""
    not_ready_reason: str = ""

    @property
    def ready(self) -> bool:
        """The worker takes requests, so there is no reason why it would not."""
        return not self.not_ready_reason


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
