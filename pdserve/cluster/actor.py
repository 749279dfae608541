"""The Ray actor of one worker. Its process holds the worker, the guard that watches the worker, and the log file.

The process that Ray spawns imports this module. Only the worker's own module, imported later, loads torch and NIXL.
The constructor does little, so the actor's first answer soon tells that it has a place; `load` then starts the worker. A
worker that died gets a new actor, and so a new incarnation, which dials the router by itself.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from pdserve.cluster.guard import NODE_LEAVING, Guard
from pdserve.cluster.plan import WorkerPlan, on_this_node
from pdserve.config import WorkerConfig
from pdserve.core.worker import niced
from pdserve.observe.logs import setup_logging
from pdserve.worker.load_progress import LoadProgress, LoadState
from pdserve.worker.memory_report import MemoryReport

log = logging.getLogger(__name__)


class RunningWorker(Protocol):
    """A started worker. `start(config, progress)` of `prefill_worker.main` and of `decode_worker.main` return one."""

    address: str
    memory: MemoryReport
    computes: str

    @property
    def healthy(self) -> bool:
        """False once the worker can no longer do its work."""

    def wait(self, timeout_s: float | None) -> int | None:
        """Return the exit status: None while the worker runs, 0 once it has drained or was stopped."""

    def stop(self, timeout_s: float) -> object:
        """Stop the worker without draining it, within `timeout_s`."""


@dataclass(frozen=True, slots=True)
class Place:
    """The node on which the process of a worker runs."""

    node_id: str
    host: str


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The description that a worker's process gives after the start. The `*_s` fields are the parts of the start's time."""

    worker_id: str
    role: str
    address: str
    pid: int
    memory: MemoryReport
    computes: str
    niceness: int  # niceness of the process; Ray's default is 15, which yields to every ordinary process of the machine
    process_s: float  # time from the request to Ray until our code runs; it is right only if both are on one machine
    import_s: float
    load_s: float


class WorkerActor:
    """The Ray actor. The worker starts its own threads. Each call blocks one of Ray's threads, `watch` until the end."""

    CONCURRENCY = 4  # watch, load, progress and stop may run at the same time

    def __init__(self, plan: WorkerPlan, asked_at: float) -> None:
        self._process_s = time.time() - asked_at
        _log_to(Path(plan.log_dir) / f"{plan.worker_id}.log")
        self._plan = plan
        self._loading = threading.Lock()
        self._report: WorkerReport | None = None
        self._progress = LoadProgress()
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0)
        if self._niceness > 0:
            log.warning("%s", niced([plan.worker_id], self._niceness))

    def place(self) -> Place:
        """Tell on which node this process runs."""
        import ray  # only here: this module also describes workers to a process that has not loaded Ray yet

        return Place(ray.get_runtime_context().get_node_id(), _node_host())

    def load(self) -> WorkerReport:
        """Start the worker and describe it. A worker that has started is only described: a caller may have to ask again."""
        with self._loading:
            if self._report is None:
                gc.disable()  # hardly anything of what is loaded is garbage, and looking takes 15 % of the time of imports
                try:
                    self._report = self._load()
                finally:
                    gc.enable()
            return self._report

    def progress(self) -> LoadState | None:
        """Tell how far `load` is; None: nothing is known yet."""
        return self._progress.state

    def _load(self) -> WorkerReport:
        plan, began = self._plan, time.time()
        config = on_this_node(plan, _node_host())
        module, _, function = plan.entry.partition(":")
        start = getattr(importlib.import_module(module), function)
        imported = time.time()
        self._worker = _start(start, config, self._progress)
        self._guard = Guard(self._worker, node_leaves=lambda: plan.node_address and NODE_LEAVING.exists())
        return self._describe(imported - began, time.time() - imported)

    def watch(self) -> bool:
        """Wait for the worker's end. True: it has drained. False: it was told to stop.

        When the process dies first, Ray fails the caller's call, which tells the caller of the death.
        """
        return self._guard.wait()

    def stop(self, timeout_s: float) -> None:
        """Stop the worker without draining it. Ray ends the process afterwards."""
        self._guard.stop()
        self._worker.stop(timeout_s)

    def _describe(self, import_s: float, load_s: float) -> WorkerReport:
        return WorkerReport(
            worker_id=self._plan.worker_id,
            role=self._plan.role,
            address=self._worker.address,
            pid=os.getpid(),
            memory=self._worker.memory,
            computes=self._worker.computes,
            niceness=self._niceness,
            process_s=self._process_s,
            import_s=import_s,
            load_s=load_s,
        )


def _start(start: Any, config: WorkerConfig, progress: LoadProgress) -> RunningWorker:
    """Start the worker. A failure is also written to the worker's log, where an operator looks first."""
    try:
        return cast(RunningWorker, start(config, progress))
    except BaseException:
        log.exception("%s cannot start", config.worker_id)
        raise


def _node_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _log_to(path: Path) -> None:
    """Append everything that this process writes to `path`, the output of native libraries too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    setup_logging("info", stream=os.fdopen(2, "w", closefd=False))  # Ray may have put a stream of its own in sys.stderr
