"""The decision whether a cluster that starts goes on, waits, or ends. Pure.

A start goes on without the workers that failed or are slow: they are handled like workers that die later. It ends where
nothing can be served: no worker of a pool that is needed could start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.cluster.errors import ClusterError
from pdserve.core.errors import PdserveError

JOIN_TIMEOUT_S: Final = 60.0  # a loaded worker dials the router at once, so joining takes about one round trip
LEAST_PATIENCE_S: Final = 10.0
"""A start that could go on waits for slower workers for so long, or as long again as it took, whichever is more: workers that
start together are ready together, unless something is wrong with one."""


@dataclass(frozen=True, slots=True)
class Starter:
    """One worker of a cluster that starts.

    failure: the reason why its first start failed. loaded_s: seconds since it was loaded and a router could welcome it; None:
    it is not loaded. ready: the router may place requests on it.
    """

    worker_id: str
    role: str
    failure: PdserveError | None
    loaded_s: float | None
    ready: bool


def goes_on(workers: Sequence[Starter], needed: Sequence[str], *, since_start_s: float, since_quorum_s: float | None) -> bool:
    """Tell whether the start is over. needed: the roles without which nothing is served.

    since_quorum_s: seconds since each needed role had a ready worker for the first time; None: it has not.
    Raises the first failure of a needed role all of whose workers failed, and `ClusterError` when they load and do not join.
    """
    for role in needed:
        pool = [worker for worker in workers if worker.role == role]
        failures = [worker.failure for worker in pool if worker.failure is not None]
        if pool and len(failures) == len(pool):
            raise failures[0]
        joining = [worker for worker in pool if worker.failure is None]
        late = [worker for worker in joining if worker.loaded_s is not None and worker.loaded_s > JOIN_TIMEOUT_S]
        if joining and len(late) == len(joining) and not any(worker.ready for worker in joining):
            raise ClusterError(f"{', '.join(worker.worker_id for worker in joining)} did not join the router")
    if not has_quorum(workers, needed):
        return False
    if all(worker.ready or worker.failure is not None for worker in workers):
        return True
    if since_quorum_s is None:
        return False
    return since_quorum_s >= max(LEAST_PATIENCE_S, since_start_s - since_quorum_s)


def has_quorum(workers: Sequence[Starter], needed: Sequence[str]) -> bool:
    """Tell whether each needed role has a worker that is ready."""
    return all(any(worker.role == role and worker.ready for worker in workers) for role in needed)
