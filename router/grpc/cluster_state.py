"""The snapshot of the cluster becomes the message that `GetClusterState` answers with."""

from __future__ import annotations

from pdserve.observe.snapshot import COUNTS, ClassSnapshot, ClusterSnapshot, PairSnapshot, WorkerSnapshot
from pdserve.rpc.codec import demand_to_wire, hello_to_fields, load_to_fields, utilisation_to_fields
from pdserve.rpc.v1 import inference_pb2


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
        demand=demand_to_wire(cluster.demand),
        classes=[_class_state(one, cluster.classes_window_s) for one in cluster.classes],
    )


def _class_state(one: ClassSnapshot, window_s: float) -> inference_pb2.ClassState:
    counts = {name: getattr(one, name) for name in COUNTS}
    return inference_pb2.ClassState(slo_class=one.slo_class, window_s=window_s, **counts)


def _set_aside(pair: PairSnapshot) -> inference_pb2.SetAsidePair:
    return inference_pb2.SetAsidePair(
        prefill_worker=pair.prefill_worker,
        decode_worker=pair.decode_worker,
        reason=pair.reason,
        remaining_s=pair.remaining_s,
        failures=pair.failures,
    )


def _worker_state(worker: WorkerSnapshot) -> inference_pb2.WorkerState:
    return inference_pb2.WorkerState(
        hello=hello_to_fields(worker.hello),
        load=load_to_fields(worker.load),
        ready=worker.ready,
        not_ready_reason=worker.not_ready_reason,
        draining=worker.draining,
        heartbeat_age_s=worker.heartbeat_age_s,
        requests_placed=worker.requests_placed,
        recent=utilisation_to_fields(worker.recent),
        since_start=utilisation_to_fields(worker.since_start),
    )
