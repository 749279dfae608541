"""A worker as its actor sees one: `start(config, progress)` and a `RunningWorker`. It dials the stand-in router and waits."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pdserve.checkpoint.progress import Progress
from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError
from pdserve.worker.start_report import MemoryReport

LOAD_TIMEOUT_S = 60.0

REFUSED_THREADS, BREAKING_THREADS, LONG_REFUSED_THREADS = 1001, 1002, 1003
"""A setting that only a worker can judge: the stand-in refuses the first number, breaks with the second one, and refuses the
third one in so many words that they are still being told when its process could end."""
LONG_CHARS = 64 << 20


class Worker:
    def __init__(self, config: WorkerConfig, role: str) -> None:
        self._roles = [role, "decode" if role == "prefill" else "prefill"]
        self._listener = socket.create_server((config.host, 0))
        self.address = f"{config.host}:{self._listener.getsockname()[1]}"
        self.computes = "nothing"
        self.memory = MemoryReport(270 << 20, 45 << 20, 256 << 20, 90 << 20, 728, 16, 8192)
        self.healthy = True
        self._config = config
        self._ended = threading.Event()
        threading.Thread(target=self._dial_for_ever, daemon=True).start()

    def _dial_for_ever(self) -> None:
        host, _, port = self._config.router_address.rpartition(":")
        hello = {"worker_id": self._config.worker_id, "address": self.address, "pid": os.getpid(), "incarnation": os.getpid()}
        hello["role"] = self._roles[0]
        while not self._ended.wait(0.05):
            try:
                with socket.create_connection((host, int(port)), 1.0) as link:
                    link.settimeout(None)
                    link.sendall(json.dumps(hello).encode() + b"\n")
                    told = link.recv(1)  # nothing: the router is gone
                    if told == b"f":  # it has nothing to finish, and comes back in the other role
                        self._roles.reverse()
                        hello |= {"role": self._roles[0], "incarnation": hello["incarnation"] + 1}
                    elif told:
                        self._ended.set()  # it was told to drain
            except OSError:
                continue

    @property
    def role(self) -> str:
        return self._roles[0]

    def on_end(self, call: Callable[[], object]) -> None:
        threading.Thread(target=lambda: self._ended.wait() and call(), daemon=True).start()

    def wait(self, timeout_s: float | None) -> int | None:
        return 0 if self._ended.wait(timeout_s) else None

    def stop(self, timeout_s: float) -> int:
        self._ended.set()
        self._listener.close()
        return 0


def start_prefill(config: WorkerConfig, progress: Progress) -> Worker:
    return _start(config, "prefill", progress)


def start_decode(config: WorkerConfig, progress: Progress) -> Worker:
    return _start(config, "decode", progress)


def _start(config: WorkerConfig, role: str, progress: Progress) -> Worker:
    if config.engine.threads == REFUSED_THREADS:
        raise ConfigError(f"threads: {REFUSED_THREADS} are too many here")
    if config.engine.threads == LONG_REFUSED_THREADS:
        raise ConfigError("too many " * (LONG_CHARS // 9))
    if config.engine.threads == BREAKING_THREADS:
        raise OSError("broken")
    if Path(os.environ.get("STANDIN_BROKEN", "/nowhere")).exists():
        raise OSError("broken meanwhile")
    progress("loading weights", 30, 100)
    gate, until_s = Path(os.environ.get("STANDIN_LOADS_UNTIL", "/")), time.monotonic() + LOAD_TIMEOUT_S
    while not gate.exists() and time.monotonic() < until_s:
        time.sleep(0.01)
    return Worker(config, role)
