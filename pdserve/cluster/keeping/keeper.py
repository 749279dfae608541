"""The keeper of one worker's process: it finds the process that runs already, or starts one, and speaks for it. Without Ray."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import site
import subprocess
import sys
import time
from typing import Any, Final

from pdserve.cluster.errors import StartFailed, WorkerDied
from pdserve.cluster.gpus import VISIBLE, free_gpu
from pdserve.cluster.keeping.control import call
from pdserve.cluster.keeping.order import StartOrder, WorkerReport, check_settings, read_facts, running_workers
from pdserve.cluster.keeping.process import write_order
from pdserve.cluster.record import TIED, ClusterRecord, ProcessId, mark_of
from pdserve.core.errors import ConfigError
from pdserve.killable_child import environment
from pdserve.worker.start_report import LoadState

COMMAND: Final = (sys.executable, "-m", "pdserve.cluster.keeping.process")
START_TIMEOUT_S: Final = 120.0
"""The longest time until a new process takes calls. It is a second on an idle machine; the loading comes after it."""
ANSWER_TIMEOUT_S: Final = 120.0
"""The longest time until a process answers a call that waits for nothing. A load may hold the interpreter for long."""
POLL_S: Final = 10.0
"""One call waits so long for the worker's start or end. So a call of a keeper that was killed soon leaves the process."""
GPU_TIMEOUT_S: Final = 20.0
"""A worker waits so long for a GPU that no other one uses, then takes the one that Ray gave. Keepers that come at the same time
say theirs within a moment."""
GPU_LOOK_S: Final = 0.2
GONE_TIMEOUT_S: Final = 2.0
LOOK_S: Final = 0.02


class Keeper:
    """The keeper of one worker. Several threads may call it, each of them one method."""

    def __init__(self, order: StartOrder) -> None:
        """Find the process that runs already; it is adopted. `load` starts one where there is none."""
        shares = bool(order.plan.lasting) and 0 < order.plan.num_gpus <= 1
        self._order = dataclasses.replace(order, given=os.environ.get(VISIBLE, "") if shares else "")
        self._worker_id = order.plan.worker_id
        self._child: subprocess.Popen[bytes] | None = None
        self._ended = False  # an end was asked for, so nothing is started any more
        self._adopted = False
        self._failure: ConfigError | StartFailed | None = None  # what kept the worker from starting
        self._process: ProcessId | None = None
        self._control = ""
        name = order.plan.lasting
        record = ClusterRecord.find(name) if name else None
        facts = read_facts(record.workers.get(self._worker_id)) if record else None
        if facts is not None:
            check_settings(order.plan, facts)
            self._process, self._control, self._adopted = facts.process, facts.control, True
            if facts.router_address != order.plan.config.router_address:  # it dials a router that will never be there again
                self.end()
                self._process, self._adopted, self._ended = None, False, False

    def load(self) -> WorkerReport:
        """Start the process unless it runs, wait until its worker has started, and describe it. May be called again.

        Raises `WorkerDied` when the process ends first, and otherwise what kept the worker from starting, also when its process
        has ended since.
        """
        if self._failure is not None:
            raise self._failure
        if self._process is None:
            self._start()
        elif self._adopted and self._order.given:
            with contextlib.suppress(StartFailed):  # a process of an earlier version does not know the call
                self._call("kept", self._order.given, timeout_s=ANSWER_TIMEOUT_S)
        while True:
            try:
                report = self._call("load", POLL_S, timeout_s=POLL_S + ANSWER_TIMEOUT_S)
            except (ConfigError, StartFailed) as exc:
                self._failure = exc
                raise
            if isinstance(report, WorkerReport):
                return dataclasses.replace(report, adopted=self._adopted)

    def progress(self) -> LoadState | None:
        """Tell how far the loading is; None: nothing is known yet."""
        if self._process is None:
            return None
        state: LoadState | None = self._call("progress", timeout_s=ANSWER_TIMEOUT_S)
        return state

    def watch(self) -> bool:
        """Wait for the worker's end. True: it has drained. False: it was told to stop.

        Raises `WorkerDied` when it died, or takes no calls any more.
        """
        while True:
            drained = self._call("watch", POLL_S, timeout_s=POLL_S + ANSWER_TIMEOUT_S)
            if drained is not None:
                return bool(drained)

    def role(self) -> str:
        """Tell in which role the worker serves now."""
        return str(self._call("role", timeout_s=ANSWER_TIMEOUT_S))

    def stop(self, timeout_s: float) -> None:
        """Stop the worker without draining it, within `timeout_s`, and end its process. Idempotent."""
        self._ended = True
        if self._process is None:
            return
        with contextlib.suppress(WorkerDied):
            self._call("stop", timeout_s, timeout_s=timeout_s)
            self._wait_gone(timeout_s)
        self.end()

    def end(self) -> None:
        """End the process at once if it still runs. Idempotent."""
        self._ended = True
        if self._process is not None:
            self._process.send(signal.SIGKILL)
            self._wait_gone(GONE_TIMEOUT_S)

    def _start(self) -> None:
        """Start a process, on a GPU that no other worker uses if it needs one. Raises `WorkerDied` when it does not start."""
        given = self._order.given
        if not given:
            self._spawn({})
            return
        record = ClusterRecord.open(self._order.plan.lasting)
        deadline = time.monotonic() + GPU_TIMEOUT_S
        while self._process is None:
            with record.starting():
                running = running_workers(record).values()
                used = [(facts.gpu, facts.share) for facts in running]
                gpu = free_gpu(given, self._order.plan.num_gpus, used, [facts.given for facts in running if facts.given])
                if gpu is not None or time.monotonic() > deadline:
                    self._spawn({VISIBLE: gpu or given})
            if self._process is None:
                time.sleep(GPU_LOOK_S)

    def _spawn(self, variables: dict[str, str]) -> None:
        """Start a process and wait until it takes calls. Raises `WorkerDied` when it does not."""
        if self._ended:
            raise WorkerDied(f"{self._worker_id} was told to end before it was started")
        lasting = self._order.plan.lasting
        self._child = child = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(lasting) | variables,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            write_order(self._order, child.stdin)
        with child.stdout as said:
            ready = select.select([said], [], [], START_TIMEOUT_S)[0]
            line = said.readline() if ready else b""
        try:
            told = json.loads(line)
            self._process, self._control = ProcessId.of(told["pid"]), told["control"]
        except ValueError:
            self._process = None
        if self._process is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # a lasting process has forked, and would load on beside the next one
            child.wait()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            raise WorkerDied(f"the process of {self._worker_id} did not take calls")
        if lasting:  # it has forked and is not our child any more
            child.stdin.close()
            child.wait()

    def _call(self, method: str, *arguments: object, timeout_s: float | None) -> Any:
        """Call the process. When it has died, it is gone before `WorkerDied` is raised: the next keeper would adopt it."""
        assert self._process is not None
        try:
            return call(self._control, self._process.pid, method, *arguments, timeout_s=timeout_s)
        except WorkerDied:
            self._wait_gone(GONE_TIMEOUT_S)  # its socket closes a moment before it ends
            raise

    def _wait_gone(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self._process is not None and self._process.alive and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        if self._child is not None:
            self._child.poll()


def _environment(lasting: str) -> dict[str, str]:
    """Return our environment, with which the process imports what we import. Ray extends our own path by that of its driver.

    A lasting process carries the mark of its cluster, and not that of the private Ray, which others end.
    """
    known = environment()
    if lasting:
        known = {name: value for name, value in known.items() if name != TIED} | mark_of(lasting)
    path = known["PYTHONPATH"].split(os.pathsep)
    installed = (*site.getsitepackages(), os.path.dirname(os.__file__))
    path += [each for each in sys.path if each and each not in path and not each.startswith(installed)]
    return known | {"PYTHONPATH": os.pathsep.join(path)}
