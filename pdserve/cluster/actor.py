"""What runs inside a worker's Ray process: the worker itself, a watch over it, and its log file.

Imported by the process that Ray spawns; torch and NIXL are imported only by the worker's own module, after that.
A Ray restart runs `__init__` again: a new worker with a new incarnation, which dials the router by itself.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import ray

from pdserve.cluster.guard import NODE_LEAVING, Guard
from pdserve.cluster.plan import WorkerPlan, on_this_node
from pdserve.config import WorkerConfig
from pdserve.observe.logs import setup_logging
from pdserve.worker.memory import MemoryReport

RESTART_PAUSE_S = 1.0  # so that a worker that dies at once does not use up its restarts in a moment
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
class WorkerReport:
    """A started worker as its process describes it; `*_s` say where its start went."""

    worker_id: str
    role: str
    address: str
    pid: int
    memory: MemoryReport
    computes: str
    process_s: float  # asked of Ray to our first line (same machine's clock only)
    import_s: float
    load_s: float


class WorkerActor:
    """A plain actor: the worker starts its own threads. `watch` blocks one of Ray's; see `CONCURRENCY`."""

    CONCURRENCY = 3  # watch, report, stop

    def __init__(self, plan: WorkerPlan, asked_at: float) -> None:
        began = time.time()
        _log_to(Path(plan.log_dir) / f"{plan.worker_id}.log")
        if ray.get_runtime_context().was_current_actor_reconstructed:
            log.warning("%s is started again", plan.worker_id)
            time.sleep(RESTART_PAUSE_S)
        config = on_this_node(plan, _node_host())
        module, _, function = plan.entry.partition(":")
        start = getattr(importlib.import_module(module), function)
        imported = time.time()
        self._worker = _start(start, config)
        self._report = self._describe(plan, began - asked_at, imported - began, time.time() - imported)
        self._guard = Guard(self._worker, node_leaves=lambda: plan.node_address and NODE_LEAVING.exists())

    def report(self) -> WorkerReport:
        return self._report

    def watch(self) -> bool:
        """Return once the worker has drained (True) or was told to stop. If the process dies first, the caller's call
        fails: that is the signal."""
        return self._guard.wait()

    def stop(self, timeout_s: float) -> None:
        """Stop the worker without draining it. The process is ended by Ray afterwards."""
        self._guard.stop()
        self._worker.stop(timeout_s)

    def _describe(self, plan: WorkerPlan, process_s: float, import_s: float, load_s: float) -> WorkerReport:
        return WorkerReport(
            worker_id=plan.worker_id,
            role=plan.role,
            address=self._worker.address,
            pid=os.getpid(),
            memory=self._worker.memory,
            computes=self._worker.computes,
            process_s=process_s,
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
