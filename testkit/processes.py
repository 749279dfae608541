"""A cluster of real processes without Ray: one router, prefill and decode workers, on free ports of loopback.

Each process prints one JSON line when it is ready and stops when its standard input closes, so nothing outlives the test that
started it. Members may be killed, stopped, continued and restarted by name. `heal` makes the cluster whole whatever was done to
it.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import grpc
import psutil

from pdserve.config import EngineConfig, RouterConfig, RouterProcessConfig, WorkerConfig, dump
from pdserve.rpc.v1 import admin_pb2_grpc, inference_pb2
from testkit.zygote import Forked, Zygote

READY_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 60.0
HEAL_TIMEOUT_S: Final = 90.0  # four workers may import torch at once, on two cores that do other work as well
BOUND_S: Final = 60.0  # for anything that takes at most a few seconds on an idle machine: only what hangs should fail
FRESH_S: Final = 2.0  # a worker whose last heartbeat is older stands still; the default interval is 1 s

MODULE: Final = "PDSERVE_TESTING_MODULE"
FORK: Final = "PDSERVE_TESTING_FORK"  # set for the tests: processes are forked where that makes no difference to them
_ZYGOTE: Final = Zygote()

State = inference_pb2.GetClusterStateResponse


@dataclass(frozen=True, slots=True)
class Place:
    """The surroundings in which a member runs if they differ from the test's own. `worker` overrides fields of WorkerConfig."""

    command: tuple[str, ...] = ()  # stands before the member's own command and must exec it, as ("ip", "netns", "exec", NAME)
    env: Mapping[str, str] = field(default_factory=dict)
    module: str = ""  # runs instead of the role's module, whose name it gets as `MODULE` in its environment and must run
    worker: Mapping[str, Any] = field(default_factory=dict)


class Process:
    """One child process. `ready` is the JSON object that it printed when it was ready."""

    def __init__(
        self,
        module: str,
        config: Any,
        folder: Path,
        name: str,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = (),
    ) -> None:
        """`env` is added to the environment; `command` stands before the interpreter and must exec it."""
        self.name = name
        self.log_path = folder / f"{name}.log"
        path = folder / f"{name}.yaml"
        path.write_text(dump(config))
        inherited = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment = {**inherited, **(env or {})}
        args = ["--config", str(path), "--exit-with-parent"]
        with self.log_path.open("ab") as log:
            forked = None
            if environment.get(FORK) == "1" and not command:
                forked = _ZYGOTE.fork(module, args, environment, log)
            self.popen: Forked | subprocess.Popen[bytes] = forked or subprocess.Popen(
                [*command, sys.executable, "-m", module, *args],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        self.ready: dict[str, Any] = {}

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait for the ready line. Raises RuntimeError with the end of the log when the process ends or stays silent."""
        timer = threading.Timer(timeout_s, self.popen.kill)
        timer.start()
        try:
            assert self.popen.stdout is not None
            line = self.popen.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self.popen.wait(STOP_TIMEOUT_S)
            raise RuntimeError(f"{self.name} did not start (exit {self.popen.returncode}): {self.log()[-3000:]}")
        self.ready = json.loads(line)

    def log(self) -> str:
        """Return everything that the process has logged."""
        return self.log_path.read_text(errors="replace")

    @property
    def alive(self) -> bool:
        """The process has not ended. A stopped process is alive."""
        return self.popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal. Nothing happens when the process has ended."""
        self.popen.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL. The process has gone when this returns."""
        self.popen.kill()
        self.popen.wait(STOP_TIMEOUT_S)
        self._close_pipes()

    def pause(self) -> None:
        """Send SIGSTOP, and wait until every thread stands still. Raises TimeoutError if they do not."""
        self.send(signal.SIGSTOP)
        end_s = time.monotonic() + STOP_TIMEOUT_S
        while self.alive and not _stands_still(self.popen.pid):
            if time.monotonic() > end_s:
                raise TimeoutError(f"{self.name} does not stop")
            time.sleep(0.001)

    def resume(self) -> None:
        """Send SIGCONT."""
        self.send(signal.SIGCONT)

    def terminate(self, timeout_s: float) -> int:
        """Send SIGTERM, and return the exit status. Raises subprocess.TimeoutExpired."""
        self.send(signal.SIGTERM)
        status: int = self.popen.wait(timeout_s)
        return status

    def stop(self) -> int:
        """Close standard input, wait, and return the exit status. A process that does not end within `STOP_TIMEOUT_S` is
        killed."""
        if self.alive:
            assert self.popen.stdin is not None
            self.popen.stdin.close()
            self.resume()
            try:
                self.popen.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        self._close_pipes()
        return self.popen.returncode

    def _close_pipes(self) -> None:
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()


def _stands_still(pid: int) -> bool:
    """Tell whether every thread of a process is stopped. False: it runs, or has gone."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


class ProcessCluster:
    """A context manager. Leaving it without an exception checks that every block is accounted for.

    Worker ids are prefill-0, ..., decode-0, ... `worker` overrides fields of WorkerConfig. Every worker gets `env`. `places`
    says by name which members run elsewhere.
    """

    def __init__(
        self,
        engine: EngineConfig,
        *,
        prefill: int = 1,
        decode: int = 1,
        router: RouterConfig | None = None,
        worker: dict[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        places: Mapping[str, Place] | None = None,
    ) -> None:
        self.engine = engine
        self.prefill = prefill
        self.decode = decode
        self.processes: dict[str, Process] = {}
        self._router = replace(router or RouterConfig(), http_port=0, grpc_port=0, link_port=0, admin_port=0, metrics_port=0)
        self._worker = worker or {}
        self._env = env or {}
        self._places = dict(places or {})
        self._token = secrets.token_hex(16)

    @property
    def folder(self) -> Path:
        """The folder with the configurations and logs of all members. It exists while the cluster is entered."""
        return Path(self._folder.name)

    @property
    def worker_names(self) -> list[str]:
        """The names of all workers, prefill workers first."""
        return [f"prefill-{i}" for i in range(self.prefill)] + [f"decode-{i}" for i in range(self.decode)]

    def __enter__(self) -> ProcessCluster:
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-")
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        try:
            if kind is None and self.processes["router"].alive:
                self.assert_empty()  # whatever a test did, nothing is left of it and no block is lost
        finally:
            self._stop()

    def _stop(self) -> None:
        for process in self.processes.values():
            if process.alive and process.popen.stdin is not None:
                process.popen.stdin.close()
                process.resume()
        for process in self.processes.values():
            process.stop()
        self._folder.cleanup()

    def _start(self) -> None:
        self.start_router()
        ready = self.processes["router"].ready
        self.http, self.grpc, self.link, self.admin = (ready[name] for name in ("http", "grpc", "link", "admin"))
        ports = [int(address.rpartition(":")[2]) for address in (self.http, self.grpc, self.link, self.admin)]
        self._router = replace(self._router, http_port=ports[0], grpc_port=ports[1], link_port=ports[2], admin_port=ports[3])
        for name in self.worker_names:
            self.start_worker(name, wait=False)
        for name in self.worker_names:
            self.processes[name].wait_ready()
        self.wait_whole()

    def start_router(self, *, wait: bool = True) -> Process:
        """Start the router. Its ports are any free ones at the first start, and the same at later ones."""
        self._spawn("router", RouterProcessConfig(self._router, self.engine, self._token), "router", {})
        if wait:
            self.processes["router"].wait_ready()
        return self.processes["router"]

    def start_worker(self, name: str, *, wait: bool = True) -> Process:
        """Start a worker by its name. `wait` waits until it is ready."""
        beats = {"heartbeat_interval_s": self._router.heartbeat_interval_s, "router_lost_s": self._router.heartbeat_lost_s}
        settings = {"engine": self.engine, **beats, **self._worker, **self._places.get(name, Place()).worker}
        config = WorkerConfig(name, self.link, cluster_token=self._token, **settings)
        self._spawn(f"{name.split('-')[0]}_worker", config, name, self._env)
        if wait:
            self.processes[name].wait_ready()
        return self.processes[name]

    def move(self, name: str, place: Place) -> None:
        """Give a member another place, from its next start on."""
        self._places[name] = place

    def start(self, name: str, *, wait: bool = True) -> Process:
        """Start any member by its name. The new process replaces one that has ended."""
        if name in self.processes:
            self.processes[name].stop()
        return self.start_router(wait=wait) if name == "router" else self.start_worker(name, wait=wait)

    def heal(self, timeout_s: float = HEAL_TIMEOUT_S) -> None:
        """Continue stopped members, start members that have ended, and wait until every worker takes requests."""
        for name, process in list(self.processes.items()):
            process.resume()
            if not process.alive:
                self.start(name, wait=False)
        self.wait_whole(timeout_s)

    def wait_whole(self, timeout_s: float = HEAL_TIMEOUT_S) -> None:
        """Wait until the router reports every worker's present process as ready."""
        self.wait_state(self.is_whole, timeout_s)

    def is_whole(self, state: State) -> bool:
        """Tell whether every worker's present process is ready and its last heartbeat is fresh."""
        ready = {w.hello.worker_id: w.hello.pid for w in state.workers if w.ready and w.heartbeat_age_s < FRESH_S}
        return ready == {name: self.processes[name].popen.pid for name in self.worker_names}

    def _spawn(self, module: str, config: Any, name: str, env: Mapping[str, str]) -> None:
        place = self._places.get(name, Place())
        environment = {**env, **place.env, MODULE: module}
        self.processes[name] = Process(place.module or module, config, self.folder, name, environment, place.command)

    def logs(self) -> str:
        """Return the ends of all members' logs."""
        return "\n".join(f"--- {name}\n{process.log()[-3000:]}" for name, process in list(self.processes.items()))

    def state(self, timeout_s: float = BOUND_S) -> State:
        """Return the state that the router reports. Raises grpc.RpcError when the router does not answer."""
        with grpc.insecure_channel(self.admin) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            state: State = stub.GetClusterState(inference_pb2.GetClusterStateRequest(), timeout=timeout_s)
            return state

    def wait_state(self, predicate: Callable[[State], bool], timeout_s: float = BOUND_S) -> State:
        """Poll until the predicate of the cluster's state holds, and return that state. A router that does not answer is asked
        again.

        Raises TimeoutError with the last state and the ends of all logs.
        """
        end_s = time.monotonic() + timeout_s
        seen: object = "unknown"
        while True:
            try:
                seen = state = self.state(max(end_s - time.monotonic(), 1.0))
                if predicate(state):
                    return state
            except grpc.RpcError as exc:
                seen = exc
            if time.monotonic() > end_s:
                raise TimeoutError(f"not reached within {timeout_s} s; the state is\n{seen}\n{self.logs()}")
            time.sleep(0.05)

    def assert_empty(self, timeout_s: float = BOUND_S) -> None:
        """Check that no request, lease or block is left on any worker, and that no block is lost, by heartbeats that came after
        the call. Raises TimeoutError."""
        asked_s = time.monotonic()
        self.wait_state(
            lambda state: is_empty(state) and all(w.heartbeat_age_s < time.monotonic() - asked_s for w in state.workers),
            timeout_s,
        )


def is_empty(state: State) -> bool:
    """Tell whether nothing runs and every block of every worker is free or cached."""
    return state.queued_requests == state.running_requests == 0 and all(
        worker.load.blocks.free + worker.load.blocks.cached == worker.load.blocks.total
        and not (
            worker.load.leases_held
            or worker.load.running_sequences
            or worker.load.queued_requests
            or worker.load.blocks.unaccounted
        )
        for worker in state.workers
    )
