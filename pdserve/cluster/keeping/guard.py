"""The guard of one worker inside its Ray process. It decides whether the process ends, and whether another one follows.

A process that ends by itself counts as a worker that died, and `pdserve up` starts another. So the guard ends the process
of a worker that broke, and keeps the process of one that has drained: `pdserve up` then removes that process for good.

A node that gets SIGTERM does not pass it on: Ray tells its scheduler that the node drains, waits for a while, then ends
the processes, whatever they do (measured with Ray 2.60). On Kubernetes the pod's preStop hook therefore drains the
worker before that, and leaves a mark, `NODE_LEAVING`: the node goes, but the worker is still wanted. The empty process
then stays, so that Ray reports it lost together with its node, and the worker is started on another node.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdserve.observe.logs import flush_logs

if TYPE_CHECKING:  # a worker loads torch, and the keeper that imports this file does not
    from pdserve.worker.process import RunningWorker

HEALTH_INTERVAL_S: Final = 1.0
NODE_LEAVING: Final = Path("/tmp/pdserve-node-leaving")
"""The preStop hook of a worker's pod makes this file. Each pod has its own /tmp."""
log = logging.getLogger(__name__)


def end_process() -> None:
    """End this process at once, with status 1 and without clean-up.

    The transport of an unhealthy worker may still write to the worker's memory, and unloading the transport can hang.
    """
    flush_logs()
    os._exit(1)


class Guard:
    """A thread that looks at the worker every `interval_s` and when it ends, until it has ended or `stop` was called."""

    def __init__(
        self,
        worker: RunningWorker,
        *,
        node_leaves: Callable[[], bool],
        end_process: Callable[[], None] = end_process,
        interval_s: float = HEALTH_INTERVAL_S,
    ) -> None:
        self._worker = worker
        self._node_leaves = node_leaves
        self._end_process = end_process
        self._interval_s = interval_s
        self._over = threading.Event()
        self._look = threading.Event()
        self._drained = False
        worker.on_end(self._look.set)
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Block until the guard is over. True: the worker has drained. False: `stop` was called."""
        self._over.wait()
        return self._drained

    def stop(self) -> None:
        """End the watch, because the worker's end is wanted from now on. Idempotent."""
        self._over.set()
        self._look.set()
        self._thread.join(self._interval_s)

    def _run(self) -> None:
        while True:
            self._look.wait(self._interval_s)
            if self._over.is_set():
                return
            self._look.clear()
            status = self._worker.wait(0.0)
            if status == 0:
                self._has_drained()
                return
            if status is not None or not self._worker.healthy:
                log.error("the worker %s; ending its process", "is unhealthy" if status is None else f"exited with {status}")
                self._end_process()
                return

    def _has_drained(self) -> None:
        if self._node_leaves():
            log.info("the worker has drained; its node leaves")
            return
        log.info("the worker has drained")
        self._drained = True
        self._over.set()
