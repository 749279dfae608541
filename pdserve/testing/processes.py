"""A cluster of real processes without Ray: one router, prefill and decode workers, on free ports of loopback.

Each process prints one JSON line when it is ready and stops when its standard input closes, so nothing outlives the
test that started it.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import grpc

from pdserve.config import EngineConfig, RouterConfig, RouterProcessConfig, WorkerConfig, dump
from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc

READY_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 15.0


class Process:
    """One child. `ready` is what it said of itself."""

    def __init__(self, module: str, config: Any, folder: Path, name: str, env: dict[str, str] | None = None) -> None:
        self.name = name
        self.log_path = folder / f"{name}.log"
        path = folder / f"{name}.yaml"
        path.write_text(dump(config))
        inherited = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with self.log_path.open("ab") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(path), "--exit-with-parent"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**inherited, **(env or {})},
            )
        self.ready: dict[str, Any] = {}

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Raises RuntimeError with the end of the log when the process ends or stays silent."""
        timer = threading.Timer(timeout_s, self.popen.kill)
        timer.start()
        try:
            assert self.popen.stdout is not None
            line = self.popen.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self.popen.wait(5)
            raise RuntimeError(f"{self.name} did not start (exit {self.popen.returncode}): {self.log()[-3000:]}")
        self.ready = json.loads(line)

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stop(self) -> int:
        """Close its standard input and wait; kill it past the bound. Returns the exit status."""
        if self.popen.poll() is None:
            assert self.popen.stdin is not None
            self.popen.stdin.close()
            try:
                self.popen.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        return self.popen.returncode


class ProcessCluster:
    """Use as a context manager. Worker ids are prefill-0, ..., decode-0, ... `worker` overrides WorkerConfig's fields."""

    def __init__(
        self,
        engine: EngineConfig,
        *,
        prefill: int = 1,
        decode: int = 1,
        router: RouterConfig | None = None,
        worker: dict[str, Any] | None = None,
    ) -> None:
        self.engine = engine
        self.prefill = prefill
        self.decode = decode
        self.processes: dict[str, Process] = {}
        self._router = router or RouterConfig()
        self._worker = worker or {}
        self._token = secrets.token_hex(16)

    def __enter__(self) -> ProcessCluster:
        self._folder = tempfile.TemporaryDirectory(prefix="pdserve-")
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.popen.poll() is None and process.popen.stdin is not None:
                process.popen.stdin.close()
        for process in self.processes.values():
            process.stop()
        self._folder.cleanup()

    def _start(self) -> None:
        router = replace(self._router, http_port=0, grpc_port=0, link_port=0)
        self._spawn("router", RouterProcessConfig(router, self.engine, self._token), "router")
        self.processes["router"].wait_ready()
        ready = self.processes["router"].ready
        self.http, self.grpc, self.link = ready["http"], ready["grpc"], ready["link"]
        names = [f"prefill-{i}" for i in range(self.prefill)] + [f"decode-{i}" for i in range(self.decode)]
        for name in names:
            self.start_worker(name, wait=False)
        for name in names:
            self.processes[name].wait_ready()
        self.wait_state(lambda state: sum(w.ready for w in state.workers) == len(names))

    def start_worker(self, name: str, *, wait: bool = True) -> Process:
        config = WorkerConfig(name, self.link, self.engine, cluster_token=self._token, **self._worker)
        self._spawn(f"{name.split('-')[0]}_worker", config, name)
        if wait:
            self.processes[name].wait_ready()
        return self.processes[name]

    def _spawn(self, module: str, config: Any, name: str) -> None:
        self.processes[name] = Process(module, config, Path(self._folder.name), name)

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{process.log()[-3000:]}" for name, process in self.processes.items())

    def state(self) -> inference_pb2.GetClusterStateResponse:
        with grpc.insecure_channel(self.grpc) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            state: inference_pb2.GetClusterStateResponse
            state = stub.GetClusterState(inference_pb2.GetClusterStateRequest(), timeout=10)
            return state

    def wait_state(self, predicate: Any, timeout_s: float = 30.0) -> inference_pb2.GetClusterStateResponse:
        """Poll until the predicate of the cluster's state holds; raises TimeoutError with the last state."""
        end_s = time.monotonic() + timeout_s
        while True:
            state = self.state()
            if predicate(state):
                return state
            if time.monotonic() > end_s:
                raise TimeoutError(f"not reached within {timeout_s} s; the state is\n{state}\n{self.logs()}")
            time.sleep(0.05)

    def assert_empty(self) -> None:
        """No request, lease or block is left on any worker, and none was lost. Waits for two heartbeats at most."""
        self.wait_state(is_empty, timeout_s=10.0)


def is_empty(state: inference_pb2.GetClusterStateResponse) -> bool:
    """Nothing runs and every block of every worker is free or cached."""
    return state.queued_requests == state.running_requests == 0 and all(
        worker.blocks.free + worker.blocks.cached == worker.blocks.total
        and not (worker.leases_held or worker.running_sequences or worker.queued_requests or worker.blocks.unaccounted)
        for worker in state.workers
    )


def worker_ids(state: inference_pb2.GetClusterStateResponse) -> Sequence[str]:
    return [worker.worker_id for worker in state.workers]
