"""The cluster as `GetClusterState` describes it."""

from __future__ import annotations

from pdserve.rpc.v1 import common_pb2, inference_pb2
from router.events import Role
from router.registry import Worker
from router.service import RouterService

_ROLES = {Role.PREFILL: common_pb2.ROLE_PREFILL, Role.DECODE: common_pb2.ROLE_DECODE}


def cluster_state(service: RouterService) -> inference_pb2.GetClusterStateResponse:
    core, now_s = service.core, service.now_s()
    return inference_pb2.GetClusterStateResponse(
        router_incarnation=service.incarnation,
        queued_requests=len(core.waiting),
        running_requests=core.num_requests - len(core.waiting),
        workers=[_worker(worker, now_s, service) for worker in core.registry],
    )


def _worker(worker: Worker, now_s: float, service: RouterService) -> inference_pb2.WorkerState:
    hello, load = worker.hello, worker.load
    blocks = load.blocks
    return inference_pb2.WorkerState(
        worker_id=hello.worker_id,
        role=_ROLES[hello.role],
        incarnation=hello.incarnation,
        address=hello.address,
        ready=not service.core.placer.suspect(worker, now_s=now_s),
        blocks=common_pb2.BlockCounts(
            total=blocks.total,
            free=blocks.free,
            cached=blocks.cached,
            held=blocks.held,
            quarantined=blocks.quarantined,
            unaccounted=blocks.unaccounted,
        ),
        queued_requests=load.queued_requests,
        queued_tokens=worker.queued_tokens,
        running_sequences=load.running_sequences,
        leases_held=load.leases_held,
        heartbeat_age_s=max(0.0, now_s - worker.last_seen_s),
        requests_placed=len(worker.work),
        loop_lag_ms=load.loop_lag_ms,
        pid=hello.pid,
    )
