"""The watch over one worker inside its Ray process: who ends the process, and whether another one follows.

A process that ends by itself is taken for a worker that died, and another is started. So a worker that broke ends its
process, and one that has drained only says so: whoever started it then removes it for good.

A node that gets SIGTERM does not pass it on: Ray tells its scheduler that the node drains, waits for a while, then ends
the processes, whatever they do (measured with Ray 2.60). On Kubernetes the pod's preStop hook therefore drains the
worker before that, and leaves a mark, `NODE_LEAVING`: the node goes, the worker is still wanted. Its process then stays
as it is, empty, so that Ray finds it lost with the node and starts it on another one.
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
