"""The Ray actor that keeps one worker on its node. The worker itself is a process of its own, which the actor starts or adopts.

The process that Ray spawns imports this module, and neither torch nor NIXL, which only the worker's process loads. The
constructor does little, so the actor's first answer soon tells that it has a place; `load` then starts the worker. A
worker that died gets a new actor, and so a new incarnation, which dials the router by itself.
"""

from __future__ import annotations

import threading

from pdserve.cluster.keeping.keeper import Keeper
from pdserve.cluster.keeping.order import NodePlace, StartOrder, WorkerReport
from pdserve.cluster.plan import WorkerPlan
from pdserve.worker.start_report import LoadState


class WorkerActor:
    """The Ray actor. Each call blocks one of Ray's threads, `watch` until the end."""

    CONCURRENCY = 4  # watch, load, progress and stop may run at the same time

    def __init__(self, plan: WorkerPlan, asked_at: float) -> None:
        self._keeper = Keeper(StartOrder(plan, _node_host(), asked_at))
        self._loading = threading.Lock()

    def place(self) -> NodePlace:
        """Tell on which node this process runs."""
        import ray  # only here: this module also describes workers to a process that has not loaded Ray yet

        return NodePlace(ray.get_runtime_context().get_node_id(), _node_host())

    def load(self) -> WorkerReport:
        """Start the worker and describe it. A worker that has started is only described: a caller may have to ask again."""
        with self._loading:
            return self._keeper.load()

    def progress(self) -> LoadState | None:
        """Tell how far `load` is; None: nothing is known yet."""
        return self._keeper.progress()

    def watch(self) -> bool:
        """Wait for the worker's end. True: it has drained. False: it was told to stop. Raises `WorkerDied` when it died."""
        return self._keeper.watch()

    def role(self) -> str:
        """Tell in which role the worker serves now."""
        return self._keeper.role()

    def stop(self, timeout_s: float) -> None:
        """Stop the worker without draining it, and end its process."""
        self._keeper.stop(timeout_s)

    def end(self) -> None:
        """End the worker's process at once."""
        self._keeper.end()


def _node_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
