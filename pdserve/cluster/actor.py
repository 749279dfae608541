"""What runs inside a worker's Ray process: the worker itself, a watch over it, and its log file.

Imported by the process that Ray spawns; torch and NIXL are imported only by the worker's own module, after that.
Making the actor does little, so that its first answer tells that it has a place; `load` then starts the worker. A worker
that died gets a new actor, hence a new incarnation, which dials the router by itself.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import ray

from pdserve.cluster.guard import NODE_LEAVING, Guard
from pdserve.cluster.plan import WorkerPlan, on_this_node
from pdserve.config import WorkerConfig
from pdserve.core.niceness import niced
from pdserve.observe.logs import setup_logging
from pdserve.worker.memory_report import MemoryReport

log = logging.getLogger(__name__)


class RunningWorker(Protocol):
    """What `start(config)` of `prefill_worker.main` and `decode_worker.main` returns."""

    address: str
    memory: MemoryReport
    computes: str

    @property
    def healthy(self) -> bool: ...

    def wait(self, timeout_s: float | None) -> int | None:
        """None while it runs; 0 once it has drained or was stopped."""

    def stop(self, timeout_s: float) -> object: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where Ray put a worker, once its process runs there."""

    node_id: str
    host: str


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A started worker as its process describes it; `*_s` say where its start went."""

    worker_id: str
    role: str
    address: str
    pid: int
    memory: MemoryReport
    computes: str
    niceness: int  # of its process; Ray's own default is 15, which yields to every ordinary process of the machine
    process_s: float  # asked of Ray to our first line (same machine's clock only)
    import_s: float
    load_s: float


class WorkerActor:
    """A plain actor: the worker starts its own threads. `watch` blocks one of Ray's; see `CONCURRENCY`."""

    CONCURRENCY = 3  # watch, load, stop

    def __init__(self, plan: WorkerPlan, asked_at: float) -> None:
        self._process_s = time.time() - asked_at
        _log_to(Path(plan.log_dir) / f"{plan.worker_id}.log")
        self._plan = plan
        self._loading = threading.Lock()
        self._report: WorkerReport | None = None
        self._niceness = os.getpriority(os.PRIO_PROCESS, 0)
        if self._niceness > 0:
            log.warning("%s", niced([plan.worker_id], self._niceness))

    def place(self) -> Place:
        return Place(ray.get_runtime_context().get_node_id(), _node_host())

    def load(self) -> WorkerReport:
        """Start the worker, or only describe it once it is started: a caller who lost the connection asks again."""
        with self._loading:
            if self._report is None:
                self._report = self._load()
            return self._report

    def _load(self) -> WorkerReport:
        plan, began = self._plan, time.time()
        config = on_this_node(plan, _node_host())
        module, _, function = plan.entry.partition(":")
        start = getattr(importlib.import_module(module), function)
        imported = time.time()
        self._worker = _start(start, config)
        self._guard = Guard(self._worker, node_leaves=lambda: plan.node_address and NODE_LEAVING.exists())
        return self._describe(imported - began, time.time() - imported)

    def watch(self) -> bool:
        """Return once the worker has drained (True) or was told to stop. If the process dies first, the caller's call
        fails: that is the signal."""
        return self._guard.wait()

    def stop(self, timeout_s: float) -> None:
        """Stop the worker without draining it. The process is ended by Ray afterwards."""
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


def _start(start: Any, config: WorkerConfig) -> RunningWorker:
    """Run the worker's entry; its failure is also written to its log, where an operator looks first."""
    try:
        return cast(RunningWorker, start(config))
    except BaseException:
        log.exception("%s cannot start", config.worker_id)
        raise


def _node_host() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _log_to(path: Path) -> None:
    """Everything this process writes goes to `path`, native libraries' output too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    setup_logging("info", stream=os.fdopen(2, "w", closefd=False))  # Ray may have put a stream of its own in sys.stderr
