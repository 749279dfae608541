"""A live cluster as a search sees it, through the router's port for administration."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from pdserve.client import AdminClient
from pdserve.core.errors import Unavailable
from pdserve.rpc.v1 import common_pb2, inference_pb2
from pdserve_bench.search.figures import Busy, Counters

_POLL_S: Final = 0.2


class LiveCluster:
    """The counters of the workers, and whether they work. The caller closes the client."""

    def __init__(self, client: AdminClient) -> None:
        """Look at the cluster of a client."""
        self._client = client

    async def counters(self) -> Counters:
        """Return what the workers have counted so far. It is as old as their last heartbeats."""
        return counters_of(await asyncio.to_thread(self._client.cluster_state))

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no request runs or waits. Raises `Unavailable`."""
        end_s = time.monotonic() + timeout_s
        while busy := busy_of(await asyncio.to_thread(self._client.cluster_state)):
            if time.monotonic() > end_s:
                raise Unavailable(
                    f"the cluster still works {timeout_s:g} s after the last request of the search ended ({busy}): other "
                    "clients must not use it during a search"
                )
            await asyncio.sleep(_POLL_S)


def counters_of(state: inference_pb2.GetClusterStateResponse) -> Counters:
    """Return the counters of all workers."""
    return {
        (one.hello.worker_id, one.hello.incarnation): Busy(
            one.hello.role == common_pb2.ROLE_PREFILL,
            one.load.prompt_busy_s + one.load.decode_busy_s,
            one.load.uptime_s,
            one.load.prompt_busy_s,
        )
        for one in state.workers
    }


def busy_of(state: inference_pb2.GetClusterStateResponse) -> str:
    """Return what the router and the workers still have, in words. Empty: nothing."""
    counts = [("the router", state.queued_requests + state.running_requests)]
    counts += [(one.hello.worker_id, one.load.running_sequences + one.load.queued_requests) for one in state.workers]
    return ", ".join(f"{name} has {count} requests" for name, count in counts if count)
