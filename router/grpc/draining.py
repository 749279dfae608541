"""The progress of a drain or a role flip: what the worker still has, told whenever it changes. This reads the state of the one
worker and changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Final

from pdserve.core.errors import ReplicaLost, StaleOrder, UnknownWorker
from pdserve.core.worker import Role
from pdserve.observe.snapshot import WorkerSnapshot
from router.api.router_api import AdminApi

LOOK_S: Final = 0.2  # the time between two looks; one worker's state costs microseconds, and a person watches
QUIET_S: Final = 1.0  # the longest time between two messages: a silent stream looks like a dead one

JOIN_TIMEOUT_S: Final = 60.0
"""A worker that has left for another role is back within this time. Its transport starts in seconds, or fails after as many."""

MAX_NAMES: Final = 20
"""An error names so many workers. A refusal of a call has room for some KiB."""


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """The work that is left on a draining worker. `done`: the worker has left, and this is the last message."""

    requests_placed: int = 0
    running_sequences: int = 0
    leases_held: int = 0
    blocks_held: int = 0
    elapsed_s: float = 0.0
    done: bool = False
    incarnation: int = 0
    """The new incarnation of a worker that has changed its role, in the last message."""


Look = Callable[[str], WorkerSnapshot | None]
"""Returns the state of a linked worker by its id."""


def find(router: AdminApi, worker_id: str, incarnation: int = 0) -> WorkerSnapshot:
    """Return the state of a worker. `incarnation` 0: it may have any.

    Raises `UnknownWorker`, naming some of the workers that are linked, and `StaleOrder` for a worker of another incarnation.
    """
    worker = router.worker(worker_id)
    if worker is None:
        names = [one.hello.worker_id for one in router.snapshot().workers]
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        known = (", ".join(names[:MAX_NAMES]) or "none") + more
        raise UnknownWorker(f"{worker_id!r} is not linked to this router; linked: {known}", field="worker_id")
    if incarnation not in (0, worker.hello.incarnation):
        raise StaleOrder(f"{worker_id!r} has incarnation {worker.hello.incarnation:x} now, not {incarnation:x}")
    return worker


async def follow(look: Look, worker: WorkerSnapshot) -> AsyncIterator[DrainProgress]:
    """Yield the progress until this incarnation of the worker is gone. A worker of the same name that joins later is another
    one."""
    loop = asyncio.get_running_loop()
    began_s = told_s = loop.time()
    told: DrainProgress | None = None
    while (left := _left_on(look, worker)) is not None:
        now_s = loop.time()
        if left != told or now_s - told_s >= QUIET_S:
            told, told_s = left, now_s
            yield replace(left, elapsed_s=now_s - began_s)
        await asyncio.sleep(LOOK_S)
    yield DrainProgress(elapsed_s=loop.time() - began_s, done=True)


async def follow_flip(look: Look, worker: WorkerSnapshot, role: Role) -> AsyncIterator[DrainProgress]:
    """Yield the progress until the worker has joined in its new role. The last message names its new incarnation.

    Raises `ReplicaLost` when the worker comes back in its old role, or not within `JOIN_TIMEOUT_S` after it has left: its
    process has ended.
    """
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    async for progress in follow(look, worker):
        if not progress.done:
            yield progress
    left_s = told_s = loop.time()
    while (joined := look(worker.hello.worker_id)) is None:
        now_s = loop.time()
        if now_s - left_s > JOIN_TIMEOUT_S:
            raise ReplicaLost(f"{worker.hello.worker_id!r} has left and has not come back within {JOIN_TIMEOUT_S:.0f} s")
        if now_s - told_s >= QUIET_S:
            told_s = now_s
            yield DrainProgress(elapsed_s=now_s - began_s)
        await asyncio.sleep(LOOK_S)
    if joined.hello.role is not role:
        raise ReplicaLost(
            f"{worker.hello.worker_id!r} has come back as a {joined.hello.role.value} worker: it was started anew"
        )
    yield DrainProgress(elapsed_s=loop.time() - began_s, done=True, incarnation=joined.hello.incarnation)


def _left_on(look: Look, worker: WorkerSnapshot) -> DrainProgress | None:
    """Return what is left on the worker. None: it has left."""
    now = look(worker.hello.worker_id)
    if now is None or now.hello.incarnation != worker.hello.incarnation:
        return None
    blocks = now.load.blocks.held + now.load.blocks.quarantined
    return DrainProgress(now.requests_placed, now.load.running_sequences, now.load.leases_held, blocks)
