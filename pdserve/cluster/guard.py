"""The watch over one worker inside its Ray process: who ends the process, and whether another one follows.

A process that ends by itself is started again by Ray, also with status 0, while restarts last. So a worker that broke
ends its process, and one that has drained only says so: whoever started it then removes it for good.

No signal reaches a worker here. Ray runs an actor's methods beside the main thread's loop, where no handler can be
set, and when its node gets SIGTERM it ends the processes at once. On Kubernetes the pod's preStop hook therefore drains
the worker before that, and leaves a mark (`NODE_LEAVING`): the node goes, the worker is still wanted elsewhere.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

HEALTH_INTERVAL_S: Final = 1.0
NODE_LEAVING: Final = Path("/tmp/pdserve-node-leaving")
"""Made by the preStop hook of a worker's pod, whose /tmp is its own."""
log = logging.getLogger(__name__)


class Watched(Protocol):
    @property
    def healthy(self) -> bool: ...

    def wait(self, timeout_s: float | None) -> int | None:
        """None while it runs; 0 once it has drained or was stopped."""


def end_process() -> None:
    """At once: the transport of an unhealthy worker may still write to its memory, and unloading it can hang."""
    logging.shutdown()
    os._exit(1)


class Guard:
    """A thread that looks at the worker every `interval_s` until it has ended or `stop` was called."""

    def __init__(
        self,
        worker: Watched,
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
        self._drained = False
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Until there is nothing to guard any more. True: the worker has drained. False: `stop` was called."""
        self._over.wait()
        return self._drained

    def stop(self) -> None:
        """What happens to the worker from now on is meant. Idempotent."""
        self._over.set()
        self._thread.join(self._interval_s)

    def _run(self) -> None:
        while not self._over.wait(self._interval_s):
            status = self._worker.wait(0.0)
            if status == 0 and not self._node_leaves():
                log.info("the worker has drained")
                self._drained = True
                self._over.set()
            elif status is not None or not self._worker.healthy:
                log.error("%s; ending its process", _why(status))
                self._end_process()
                return


def _why(status: int | None) -> str:
    if status is None:
        return "the worker is unhealthy"
    return "the worker has drained, and its node leaves" if status == 0 else f"the worker exited with {status}"
