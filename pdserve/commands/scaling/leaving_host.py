"""A host that leaves: all its workers drain, and the command looks now and then until they have left.

Each look is a connection of its own, and short. Otherwise the preStop hooks of many pods would take all places of the admin
port for as long as they drain. A hook that finds it full comes again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final

import grpc

from pdserve.client import CALL_TIMEOUT_S, AdminClient, CallFailed
from pdserve.core.errors import ErrorCode

LOOK_S: Final = 2.0  # 1,000 hooks are 500 connections a second, of which each makes one call
GIVE_UP_S: Final = 30.0
"""A router that has not answered for so long will not: a router that died is back in less, and a deleted cluster has no
router."""
_LEFT: Final = (ErrorCode.UNKNOWN_WORKER.value, ErrorCode.STALE_ORDER.value)


def drain_host(
    address: str, cluster_token: str, host: str, tell: Callable[[str], object], *, wait: bool = True, look_s: float = LOOK_S
) -> None:
    """Drain all workers at an address, and return when they have left. `tell` gets each of them then. wait False: return when
    they have been told.

    Raises `CallFailed` when the router refuses it, or does not answer for `GIVE_UP_S`.
    """
    workers: dict[str, int] | None = None  # those that are left, with their incarnations; None: they are not known yet
    answered_s = time.monotonic()
    while workers is None or workers:
        if workers is not None:
            time.sleep(look_s * random.uniform(0.5, 1.5))
        try:
            with AdminClient(address, cluster_token) as client:
                if workers is None:
                    hellos = [worker.hello for worker in client.cluster_state().workers]
                    there = [hello for hello in hellos if hello.address.rpartition(":")[0].strip("[]") == host]
                    workers = {hello.worker_id: hello.incarnation for hello in there}
                for worker_id, incarnation in list(workers.items()):
                    if not _still_there(client, worker_id, incarnation):
                        del workers[worker_id]
                        tell(worker_id)
            if not wait:
                return
            answered_s = time.monotonic()
        except CallFailed as exc:
            passes = exc.reason is None and exc.status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            if not passes or time.monotonic() - answered_s > GIVE_UP_S:
                raise
            time.sleep(look_s * random.uniform(0.0, 0.5))


def _still_there(client: AdminClient, worker_id: str, incarnation: int) -> bool:
    """Tell the worker to drain, again if it does so already, and return whether it is linked still."""
    call = client.drain(worker_id, incarnation=incarnation, force=True, timeout_s=CALL_TIMEOUT_S)
    try:
        progress = next(iter(call), None)
    except CallFailed as exc:
        if exc.reason in _LEFT:
            return False
        raise
    call.cancel()
    return progress is None or not progress.done
