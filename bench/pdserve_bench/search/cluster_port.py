"""The calls by which a cluster is looked at and changed, as the shaper makes them. `AdminPort` makes them on a router."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeVar

from pdserve.client import AdminClient
from pdserve.core.worker import Role
from pdserve.rpc import codec
from pdserve.rpc.v1 import common_pb2, inference_pb2, scaling_pb2
from pdserve_bench.search.reshape import ClusterNow, WorkerNow

T = TypeVar("T")

ACTUATOR_LOST_S: Final = 10.0
"""The age of an actuator's last poll from which on the router takes no orders for it."""


class ClusterPort(Protocol):
    """A cluster's administration. Calls raise `pdserve.client.CallFailed`, and all of them end in bounded time."""

    async def look(self) -> ClusterNow:
        """Return the present state of the cluster."""

    async def flip(self, worker_id: str, role: Role, incarnation: int, timeout_s: float) -> None:
        """Let a worker change its role, and return when it has joined in the new one."""

    async def set_budget(self, worker_ids: Sequence[str], max_num_batched_tokens: int, max_num_seqs: int) -> None:
        """Give workers new limits. 0: the limit stays."""

    async def order(self, sizes: tuple[int, int] | None) -> int:
        """Order the sizes of the prefill and the decode pool; None leaves them to the planner. Returns the order's number."""


class AdminPort:
    """The administration port of a router. The blocking client runs in threads; the caller closes it."""

    def __init__(self, client: AdminClient) -> None:
        self._client = client

    async def look(self) -> ClusterNow:
        """Implements `ClusterPort.look`."""
        return cluster_now(await _in_thread(self._client.cluster_state))

    async def flip(self, worker_id: str, role: Role, incarnation: int, timeout_s: float) -> None:
        """Implements `ClusterPort.flip`. A cancellation ends the watching, and the flip goes on."""
        stream = self._client.flip(worker_id, codec.role_to_wire(role), incarnation=incarnation, timeout_s=timeout_s)

        def watch() -> None:
            for _ in stream:
                pass

        try:
            await _in_thread(watch, stream.cancel)
        finally:
            stream.cancel()

    async def set_budget(self, worker_ids: Sequence[str], max_num_batched_tokens: int, max_num_seqs: int) -> None:
        """Implements `ClusterPort.set_budget`."""
        nobody = common_pb2.ROLE_UNSPECIFIED
        await _in_thread(lambda: self._client.set_budget(worker_ids, nobody, max_num_batched_tokens, max_num_seqs=max_num_seqs))

    async def order(self, sizes: tuple[int, int] | None) -> int:
        """Implements `ClusterPort.order`."""
        given = {} if sizes is None else {"prefill": sizes[0], "decode": sizes[1]}
        request = scaling_pb2.ScaleRequest(automatic=sizes is None, **given)
        return await _in_thread(lambda: self._client.scale(request))


def cluster_now(state: inference_pb2.GetClusterStateResponse) -> ClusterNow:
    """Read the answer of a router."""
    scaling = state.scaling
    polls = bool(scaling.actuator) and scaling.age_s <= ACTUATOR_LOST_S
    return ClusterNow(
        router=state.router_incarnation,
        requests=state.queued_requests + state.running_requests,
        workers=tuple(_worker(one) for one in state.workers),
        actuator=scaling.actuator if polls else "",
        automatic=polls and scaling.report.mode == "automatic",
        order=scaling.report.order,
        refused=scaling.report.refused,
    )


def _worker(state: inference_pb2.WorkerState) -> WorkerNow:
    hello, load = codec.hello_from_wire(state.hello), state.load
    return WorkerNow(
        hello=hello,
        max_num_batched_tokens=load.max_num_batched_tokens or hello.max_num_batched_tokens,
        max_num_seqs=load.max_num_seqs or hello.max_num_seqs,
        ready=state.ready,
        draining=state.draining,
        work=state.requests_placed + load.queued_requests + load.running_sequences + load.leases_held,
    )


async def _in_thread(call: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """Run a blocking call in a thread. A cancellation stops the call, and waits until the thread has left it."""
    running = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await asyncio.wait((running,))
        if not running.cancelled():
            running.exception()  # it is told to nobody else
        raise
