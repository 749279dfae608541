"""The snapshot of the cluster becomes the message that `GetClusterState` answers with."""

from __future__ import annotations

from typing import Final

from pdserve.observe.snapshot import ClusterSnapshot, PairSnapshot, WorkerSnapshot
from pdserve.rpc.v1 import common_pb2, inference_pb2

_ROLES_TO_WIRE: Final = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}


def cluster_state_to_wire(cluster: ClusterSnapshot, block_size: int) -> inference_pb2.GetClusterStateResponse:
    """Return the message of a snapshot. `block_size` is in tokens."""
    return inference_pb2.GetClusterStateResponse(
        router_incarnation=cluster.router_incarnation,
        queued_requests=cluster.queued_requests,
        running_requests=cluster.running_requests,
        workers=[_worker_state(worker) for worker in cluster.workers],
        set_aside_pairs=[_set_aside(pair) for pair in cluster.set_aside],
        block_size=block_size,
        exact=cluster.exact,
    )


def _set_aside(pair: PairSnapshot) -> inference_pb2.SetAsidePair:
    return inference_pb2.SetAsidePair(
        prefill_worker=pair.prefill_worker,
        decode_worker=pair.decode_worker,
        reason=pair.reason,
        remaining_s=pair.remaining_s,
        failures=pair.failures,
    )


def _worker_state(worker: WorkerSnapshot) -> inference_pb2.WorkerState:
    counts = worker.blocks
    return inference_pb2.WorkerState(
        worker_id=worker.worker_id,
        role=_ROLES_TO_WIRE[worker.role],
        incarnation=worker.incarnation,
        address=worker.address,
        ready=worker.ready,
        blocks=common_pb2.BlockCounts(
            total=counts.total,
            free=counts.free,
            cached=counts.cached,
            held=counts.held,
            quarantined=counts.quarantined,
            unaccounted=max(0, counts.unaccounted),
        ),
        queued_requests=worker.queued_requests,
        queued_tokens=worker.queued_tokens,
        running_sequences=worker.running_sequences,
        leases_held=worker.leases_held,
        heartbeat_age_s=worker.heartbeat_age_s,
        requests_placed=worker.requests_placed,
        loop_lag_ms=worker.loop_lag_ms,
        pid=worker.pid,
        niceness=worker.niceness,
        draining=worker.draining,
        prefix_queried_tokens=worker.prefix_queried_tokens,
        prefix_hit_tokens=worker.prefix_hit_tokens,
        kv_corrupt_blocks=worker.kv_corrupt_blocks,
        kv_rotted_blocks=worker.kv_rotted_blocks,
        not_ready_reason=worker.not_ready_reason,
        quantization=worker.quantization,
    )
