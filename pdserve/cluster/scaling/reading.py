"""The answer of `GetClusterState` becomes a reading that the planner's observations are built from."""

from __future__ import annotations

from pdserve.planner.observe import ClusterReading, WorkerReading
from pdserve.rpc.codec import demand_from_wire, hello_from_wire, load_from_wire
from pdserve.rpc.v1 import inference_pb2


def reading_of(state: inference_pb2.GetClusterStateResponse, *, at_s: float) -> ClusterReading:
    """Return the reading of a state that was told at `at_s`, a time on the reader's clock."""
    return ClusterReading(
        at_s=at_s,
        router_incarnation=state.router_incarnation,
        queued_requests=state.queued_requests,
        demand=demand_from_wire(state.demand),
        workers=tuple(
            WorkerReading(hello_from_wire(one.hello), load_from_wire(one.load), one.ready, one.draining)
            for one in state.workers
        ),
    )
