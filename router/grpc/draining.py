"""The progress of a drain or a role flip: what the worker still has, told whenever it changes. This reads snapshots and changes
nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Final

from pdserve.core.errors import ReplicaLost, StaleOrder, UnknownWorker
from pdserve.core.worker import Role
from pdserve.observe.snapshot import ClusterSnapshot, WorkerSnapshot

LOOK_S: Final = 0.2  # the time between two looks; a snapshot costs microseconds, and a person watches
QUIET_S: Final = 1.0  # the longest time between two messages: a silent stream looks like a dead one

JOIN_TIMEOUT_S: Final = 60.0
"""A worker that has left for another role is back within this time. Its transport starts in seconds, or fails after as many."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The work that is left on a draining worker. `done`: the worker has left, and this is the last message."""

    requests_placed: int = 0
    running_sequences: int = 0
    leases_held: int = 0
    blocks_held: int = 0
    elapsed_s: float = 0.0
    done: bool = False
    incarnation: int = 0
    """The new incarnation of a worker that has changed its role, in the last message."""


def find(snapshot: ClusterSnapshot, worker_id: str, incarnation: int = 0) -> WorkerSnapshot:
    """Return a worker of the snapshot. `incarnation` 0: it may have any.

    Raises `UnknownWorker`, naming the workers that are linked, and `StaleOrder` for a worker of another incarnation.
    """
    for worker in snapshot.workers:
        if worker.hello.worker_id == worker_id:
            if incarnation not in (0, worker.hello.incarnation):
                raise StaleOrder(f"{worker_id!r} has incarnation {worker.hello.incarnation:x} now, not {incarnation:x}")
            return worker
    known = ", ".join(worker.hello.worker_id for worker in snapshot.workers) or "none"
    raise UnknownWorker(f"{worker_id!r} is not linked to this router; linked: {known}", field="worker_id")


async def follow(snapshot: Callable[[], ClusterSnapshot], worker: WorkerSnapshot) -> AsyncIterator[Progress]:
    """Yield the progress until this incarnation of the worker is gone. A worker of the same name that joins later is another
    one."""
    loop = asyncio.get_running_loop()
    began_s = told_s = loop.time()
    told: Progress | None = None
    while (left := _left_on(snapshot(), worker)) is not None:
        now_s = loop.time()
        if left != told or now_s - told_s >= QUIET_S:
            told, told_s = left, now_s
            yield replace(left, elapsed_s=now_s - began_s)
        await asyncio.sleep(LOOK_S)
    yield Progress(elapsed_s=loop.time() - began_s, done=True)


async def follow_flip(snapshot: Callable[[], ClusterSnapshot], worker: WorkerSnapshot, role: Role) -> AsyncIterator[Progress]:
    """Yield the progress until the worker has joined in its new role. The last message names its new incarnation.

    Raises `ReplicaLost` when the worker comes back in its old role, or not within `JOIN_TIMEOUT_S` after it has left: its
    process has ended.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async for progress in follow(snapshot, worker):
        if not progress.done:
            yield progress
    left_s = told_s = loop.time()
    while (joined := _linked(snapshot(), worker)) is None:
        now_s = loop.time()
        if now_s - left_s > JOIN_TIMEOUT_S:
            raise ReplicaLost(f"{worker.hello.worker_id!r} has left and has not come back within {JOIN_TIMEOUT_S:.0f} s")
        if now_s - told_s >= QUIET_S:
            told_s = now_s
            yield Progress(elapsed_s=now_s - began_s)
        await asyncio.sleep(LOOK_S)
    if joined.hello.role is not role:
        raise ReplicaLost(
            f"{worker.hello.worker_id!r} has come back as a {joined.hello.role.value} worker: it was started anew"
        )
    yield Progress(elapsed_s=loop.time() - began_s, done=True, incarnation=joined.hello.incarnation)


def _linked(snapshot: ClusterSnapshot, worker: WorkerSnapshot) -> WorkerSnapshot | None:
    return next((now for now in snapshot.workers if now.hello.worker_id == worker.hello.worker_id), None)


def _left_on(snapshot: ClusterSnapshot, worker: WorkerSnapshot) -> Progress | None:
    """Return what is left on the worker. None: it has left."""
    for now in snapshot.workers:
        if (now.hello.worker_id, now.hello.incarnation) == (worker.hello.worker_id, worker.hello.incarnation):
            blocks = now.load.blocks.held + now.load.blocks.quarantined
            return Progress(now.requests_placed, now.load.running_sequences, now.load.leases_held, blocks)
    return None
