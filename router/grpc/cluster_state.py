"""The snapshot of the cluster becomes the message that `GetClusterState` answers with."""

from __future__ import annotations

from typing import Final

from pdserve.core.errors import InvalidRequest
from pdserve.core.worker import Role
from pdserve.observe.snapshot import COUNTS, ClassSnapshot, ClusterSnapshot, PairSnapshot, WorkerSnapshot
from pdserve.rpc.codec import demand_to_wire, hello_to_fields, load_to_fields, utilisation_to_fields
from pdserve.rpc.v1 import common_pb2, inference_pb2

ROLES: Final = {Role.PREFILL: common_pb2.ROLE_PREFILL, Role.DECODE: common_pb2.ROLE_DECODE}


def cluster_state_to_wire(
    cluster: ClusterSnapshot, block_size: int, page_size: int = 0, page_token: str = ""
) -> inference_pb2.GetClusterStateResponse:
    """Return the message of a snapshot, with one page of its workers. `block_size` is in tokens.

    `page_size` 0: all workers. `page_token` is that of the page before. It names a place in the order of workers, so those
    that come and go between two pages move no others. Raises `InvalidRequest` for a token that is none.
    """
    after = _place(page_token)
    workers = [worker for worker in cluster.workers if after is None or _order(worker) > after]
    page = workers[:page_size] if page_size else workers
    shown = {worker.hello.worker_id for worker in page}
    paged = page_size > 0 or after is not None
    counts = [one for one in cluster.set_aside_counts if not paged or one[1] in shown]
    return inference_pb2.GetClusterStateResponse(
        router_incarnation=cluster.router_incarnation,
        queued_requests=cluster.queued_requests,
        running_requests=cluster.running_requests,
        workers=[_worker_state(worker) for worker in page],
        set_aside_pairs=[_set_aside(pair) for pair in cluster.set_aside],
        num_set_aside_pairs=cluster.num_set_aside,
        set_aside_counts=[
            inference_pb2.SetAsideCount(worker_id=worker_id, role=ROLES[role], pairs=count) for role, worker_id, count in counts
        ],
        poisoned_workers=[inference_pb2.PoisonedWorker(worker_id=name, pid=pid) for name, pid in cluster.poisoned],
        block_size=block_size,
        exact=cluster.exact,
        foreign=cluster.foreign,
        demand=demand_to_wire(cluster.demand),
        classes=[_class_state(one, cluster.classes_window_s) for one in cluster.classes],
        next_page_token=_token(page[-1]) if len(page) < len(workers) else "",
    )


def _order(worker: WorkerSnapshot) -> tuple[bool, str]:
    """Return the place of a worker in snapshots: prefill workers first, and each pool by worker id."""
    return worker.hello.role is Role.DECODE, worker.hello.worker_id


def _token(worker: WorkerSnapshot) -> str:
    return f"{worker.hello.role.value}/{worker.hello.worker_id}"


def _place(token: str) -> tuple[bool, str] | None:
    if not token:
        return None
    role, slash, worker_id = token.partition("/")
    if not slash or role not in (Role.PREFILL.value, Role.DECODE.value):
        raise InvalidRequest("page_token is not one that an answer had; begin without one", field="page_token")
    return role == Role.DECODE.value, worker_id


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
