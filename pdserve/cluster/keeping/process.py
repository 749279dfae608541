"""The process of one worker: `python -m pdserve.cluster.keeping.process`. It loads the worker, guards it, and takes calls.

Its keeper starts it, and hands the order over on standard input. A *bound* worker ends when that input is closed, so it never
outlives its keeper. A *lasting* worker is nobody's child: it forks once more, in a session of its own, so that Ray, which ends
the children of its processes, does not know it. What ties it to the cluster is its link to the router. It writes its facts into
the record of the cluster, by which the next keeper finds it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import pickle
import signal
import sys
import threading
import time
from concurrent.futures import Future, wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

from pdserve.cluster.gpus import VISIBLE
from pdserve.cluster.keeping.control import ControlServer
from pdserve.cluster.keeping.guard import NODE_LEAVING, Guard
from pdserve.cluster.keeping.order import StartOrder, WorkerFacts, WorkerReport, settings_digest, write_facts
from pdserve.cluster.plan import on_this_node
from pdserve.cluster.record import ClusterRecord, ProcessId
from pdserve.core.worker import niced
from pdserve.observe.log_files import log_file, open_log
from pdserve.observe.logs import flush_logs, setup_logging
from pdserve.observe.title import set_title
from pdserve.worker.start_report import LoadProgress, LoadState

if TYPE_CHECKING:  # a worker loads torch, which this process does once it has its order
    from pdserve.worker.process import RunningWorker

log = logging.getLogger(__name__)
LOOK_S: Final = 1.0
"""The time between two looks at the role, which the record tells to the next keeper."""
TOLD_TIMEOUT_S: Final = 10.0
"""A worker that has ended waits so long for its keeper to ask. No keeper is there when it drains while no `pdserve up` runs."""
ANSWER_TIMEOUT_S: Final = 10.0
"""The answer to the keeper takes a moment, or seconds on a machine with too much to do."""
STOP_TIMEOUT_S: Final = 3.0


class WorkerProcess:
    """One worker and its guard. The methods that take calls run in threads of the control; `run` holds the main thread."""

    def __init__(self, order: StartOrder) -> None:
        self._order = order
        self._plan = order.plan
        self._given = order.given
        self._process_s = time.time() - order.asked_at
        self._progress = LoadProgress()
        self._loaded: Future[WorkerReport] = Future()
        self._ended: Future[bool] = Future()
        self._told = threading.Event()  # a keeper has asked how it ended, and is being told
        self._worker: RunningWorker | None = None
        self._guard: Guard | None = None
        self._record = ClusterRecord.open(self._plan.lasting) if self._plan.lasting else None
        self.control = ControlServer(
            {
                "load": self.load,
                "progress": self.progress,
                "watch": self.watch,
                "stop": self.stop,
                "role": self.role,
                "kept": self.kept,
            }
        )
        self._write_facts(self._plan.role)

    def load(self, timeout_s: float) -> WorkerReport | None:
        """Describe the worker once it has started; None: not within `timeout_s`. Raises what kept it from starting."""
        try:
            return self._loaded.result(timeout_s)
        except TimeoutError:
            if self._loaded.done():  # the worker's own error
                raise
            return None
        except Exception:
            self._told.set()
            raise

    def progress(self) -> LoadState | None:
        """Tell how far the loading is; None: nothing is known yet."""
        return self._progress.state

    def watch(self, timeout_s: float) -> bool | None:
        """Tell how the worker has ended; True: it has drained. False: it was stopped. None: it has not within `timeout_s`."""
        wait([self._ended], timeout_s)
        if not self._ended.done():
            return None
        self._told.set()
        return self._ended.result()

    def stop(self, timeout_s: float) -> None:
        """Stop the worker without draining it, and end the process."""
        if self._guard is not None and self._worker is not None:
            self._guard.stop()
            self._worker.stop(timeout_s)
        self._told.set()
        self._end(drained=False)

    def role(self) -> str:
        """Tell in which role the worker serves now."""
        return self._worker.role if self._worker is not None else self._plan.role

    def kept(self, given: str) -> None:
        """Note that another keeper has come, to which Ray gave the GPU `given`."""
        self._given = given
        self._write_facts(self.role())

    def run(self) -> int:
        """Load the worker and keep it until its end. Return the exit status of the process."""
        worker_id = self._plan.worker_id
        try:
            self._loaded.set_result(self._load())
        except BaseException as exc:
            log.exception("%s cannot start", worker_id)
            self._forget()
            self._loaded.set_exception(exc)
            self._wait_told()
            return 1
        threading.Thread(target=self._follow_guard, name="end", daemon=True).start()
        role = self._plan.role
        while not wait([self._ended], LOOK_S).done:
            if self._record is not None:
                self._record.refresh(time.monotonic())
            if role != self.role():
                role = self.role()
                self._write_facts(role)
        self._forget()
        self._wait_told()
        return 0

    def _wait_told(self) -> None:
        """Wait until a keeper has asked how the worker ended, and has the answer."""
        self._told.wait(TOLD_TIMEOUT_S)
        self.control.finish(ANSWER_TIMEOUT_S)

    def _load(self) -> WorkerReport:
        plan, began = self._plan, time.time()
        niceness = os.getpriority(os.PRIO_PROCESS, 0)
        if niceness > 0:
            log.warning("%s", niced([plan.worker_id], niceness))
        config = on_this_node(plan, self._order.host)
        gc.disable()  # hardly anything of what is loaded is garbage, and looking takes 15 % of the time of imports
        try:
            module, _, function = plan.entry.partition(":")
            start = getattr(importlib.import_module(module), function)
            imported = time.time()
            worker = cast("RunningWorker", start(config, self._progress))
        finally:
            gc.enable()
        self._worker = worker
        self._guard = Guard(worker, node_leaves=lambda: plan.node_address and NODE_LEAVING.exists())
        return WorkerReport(
            worker_id=plan.worker_id,
            role=plan.role,
            address=worker.address,
            pid=os.getpid(),
            memory=worker.memory,
            computes=worker.computes,
            niceness=niceness,
            process_s=self._process_s,
            import_s=imported - began,
            load_s=time.time() - imported,
        )

    def _follow_guard(self) -> None:
        assert self._guard is not None
        self._end(drained=self._guard.wait())

    def _end(self, *, drained: bool) -> None:
        with contextlib.suppress(Exception):  # the other of the two ways was first
            self._ended.set_result(drained)

    def _write_facts(self, role: str) -> None:
        if self._plan.lasting:
            self._record = ClusterRecord.open(self._plan.lasting)  # another worker that ended may have removed empty folders
            own = ProcessId.own()
            config, share = self._plan.config, self._plan.num_gpus
            gpu = (os.environ.get(VISIBLE, ""), share, self._given) if share else ()
            facts = WorkerFacts(own, self.control.address, role, config.router_address, settings_digest(config), *gpu)
            write_facts(self._record, self._plan.worker_id, facts)

    def _forget(self) -> None:
        if self._record is None:
            return
        self._record.forget_worker(self._plan.worker_id)
        folder = self._record.folder
        if not (folder / "lock").exists():  # on a node where no `pdserve up` runs, the record has workers only
            for each in (folder / "workers", folder, folder.parent):
                with contextlib.suppress(OSError):  # others are left in it
                    each.rmdir()


def main() -> None:
    """Read the order, become the worker, and say on standard output where calls are taken. It never returns."""
    order = read_order(sys.stdin.buffer)
    plan = order.plan
    said = os.fdopen(os.dup(1), "w")  # the keeper reads it until the first line; the log takes the place of descriptor 1
    if plan.lasting:
        if os.fork():
            os._exit(0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    else:
        threading.Thread(target=_end_with_keeper, name="keeper", daemon=True).start()
    _log_to(log_file(Path(plan.log_dir), f"{plan.worker_id}.log"))
    set_title(plan.worker_id)
    process = WorkerProcess(order)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; whoever wants this worker to end calls or sends SIGTERM
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=process.stop, args=(STOP_TIMEOUT_S,)).start())
    with said:
        print(json.dumps({"pid": os.getpid(), "control": process.control.address}), file=said)
    status = process.run()
    flush_logs()
    # If rdma-core is installed, a process that created a UCX backend crashes in its exit handlers.
    os._exit(status)


def write_order(order: StartOrder, stream: IO[bytes]) -> None:
    """Write an order for `read_order`. The token of the cluster is in it, which is why it is no argument of the command."""
    pickle.dump(order, stream)
    stream.flush()


def read_order(stream: Any) -> StartOrder:
    """Read the order that the keeper wrote."""
    return cast(StartOrder, pickle.load(stream))  # noqa: S301  our parent wrote it


def _end_with_keeper() -> None:
    """End this process at once when the keeper's end of standard input is closed, which the kernel does at its death."""
    while os.read(0, 1):
        pass
    os._exit(1)


def _log_to(path: Path) -> None:
    """Append everything that this process writes to `path`, the output of native libraries too."""
    with open_log(path) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    setup_logging("info", file=path)


if __name__ == "__main__":
    main()
