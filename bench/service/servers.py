"""The servers of the comparison: clusters of ours and vLLM's CPU server, each a group of processes that can be stopped.

Only one server is asked at a time. The others are stopped by SIGSTOP in that time: an idle server takes 1 to 3 % of a core, and
more for a while after requests.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import psutil

from bench.engine.peers.install import environment
from bench.engine.peers.peer import QUIET, PeerFailed, last_line
from bench.service.cells import MODEL
from pdserve.checkpoint.cache import default_cache_dir
from pdserve.config import MIB, EngineConfig, RouterConfig
from testkit.processes import Place, ProcessCluster

KV_BYTES: Final = 512 * MIB  # the KV pool of each of our workers; 32 sequences of 320 tokens need 225 MiB
START_LIMIT_S: Final = 900.0  # vLLM compiles a model at its first load, which takes minutes
STOP_LIMIT_S: Final = 30.0
RESUME_LIMIT_S: Final = 30.0
LOST_S: Final = 3600.0  # a stopped worker of ours is not lost
RAY_NICENESS: Final = 15
VLLM: Final = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True, slots=True)
class Setup:
    """One layout of ours.

    prefill: 0 means that all workers are colocated. threads: the threads of each worker. auto: the router chooses the place of
    each prompt, instead of the prefill pool always. quantization: the quantization of the weights.
    """

    name: str
    prefill: int
    decode: int
    threads: int
    niced: bool = False
    auto: bool = False
    quantization: Literal["int8"] | None = None

    @property
    def placement(self) -> Literal["auto", "disaggregated", "colocated"]:
        """The router's setting."""
        if not self.prefill:
            return "colocated"
        return "auto" if self.auto else "disaggregated"


ONE: Final = Setup("1 colocated", 0, 1, 2)
TWO: Final = Setup("2 colocated", 0, 2, 1)
APART: Final = Setup("1P+1D", 1, 1, 1)
AUTO: Final = Setup("1P+1D, auto", 1, 1, 1, auto=True)
NICED: Final = Setup("1 colocated, niced", 0, 1, 2, niced=True)
INT8: Final = Setup("1 colocated, int8", 0, 1, 2, quantization="int8")


@dataclass(slots=True)
class Server:
    """A running server. address: its HTTP address, as HOST:PORT. parents: the processes with which it began."""

    name: str
    address: str
    ours: bool
    parents: Sequence[psutil.Process]

    def stop(self) -> None:
        """Stop all processes of the server."""
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue all processes, and wait until the server answers. Raises `PeerFailed`."""
        self._send(signal.SIGCONT)
        self.wait_ready(RESUME_LIMIT_S)

    def wait_ready(self, limit_s: float, log: Path | None = None) -> None:
        """Wait until the server answers. Raises `PeerFailed` when it ended or is silent."""
        end_s = time.monotonic() + limit_s
        while True:
            if self._answers():
                return
            if not all(map(_runs, self.parents)):
                raise PeerFailed(f"{self.name} ended" + (f": {last_line(log)}" if log else ""))
            if time.monotonic() > end_s:
                raise PeerFailed(f"{self.name} did not answer in {limit_s:.0f} s")
            time.sleep(0.1)

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection(self.address, timeout=5.0)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def cpu_s(self) -> float:
        """Return the CPU time of all its processes so far."""
        times = [process.cpu_times() for process in self._processes()]
        return float(sum(one.user + one.system for one in times))

    def _processes(self) -> list[psutil.Process]:
        found = []
        for parent in self.parents:
            with suppress(psutil.NoSuchProcess):
                found += [parent, *parent.children(recursive=True)]
        return found

    def _send(self, number: signal.Signals) -> None:
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def ours(setup: Setup, model: str) -> Iterator[Server]:
    """Run a cluster of ours: a router and workers as processes, without Ray. The router's niceness is always 0."""
    engine = EngineConfig(
        model=model,
        dtype="bfloat16",
        served_model_name=MODEL,
        threads=setup.threads,
        kv_cache_memory=KV_BYTES,
        quantization=setup.quantization,
    )
    router = RouterConfig(heartbeat_lost_s=LOST_S, placement=setup.placement)
    cluster = ProcessCluster(engine, prefill=setup.prefill, decode=setup.decode, router=router)
    if setup.niced:
        for name in cluster.worker_names:
            cluster.move(name, Place(command=("nice", "-n", str(RAY_NICENESS))))
    with cluster:
        members = [psutil.Process(process.popen.pid) for process in cluster.processes.values()]
        server = Server(setup.name, cluster.http, True, members)
        try:
            yield server
        finally:
            server._send(signal.SIGCONT)


@contextmanager
def vllm(directory: Path, port: int, threads: int) -> Iterator[Server]:
    """Run vLLM's CPU server, which is installed before if necessary. Raises `NotInstalled` or `PeerFailed`."""
    python = environment("vllm", print)
    log = default_cache_dir() / "peers" / "vllm-server.log"
    flags = ("--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL, "--dtype", "bfloat16")
    limits = ("--max-model-len", "2560", "--max-num-seqs", "64", "--disable-uvicorn-access-log")
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
    settings = {**os.environ, **QUIET, **VLLM, "OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": cores}
    command = (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(directory), *flags, *limits)
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=settings, stdout=output, stderr=output, start_new_session=True)
    try:
        server = Server("vLLM", f"127.0.0.1:{port}", False, (psutil.Process(process.pid),))
        server.wait_ready(START_LIMIT_S, log)
        yield server
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the processes of the server's session: first in order, then at once."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGCONT)
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
