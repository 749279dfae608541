"""The router as a child process. It is started, restarted at the same ports, and stopped.

The child has a process group of its own, so that Ctrl-C on a terminal reaches only us and we stop things in order. The
child also reads a pipe whose other end we hold, so it ends when we do, however we end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pdserve import config
from pdserve.cluster import processes
from pdserve.cluster.errors import ClusterError, Interrupted
from pdserve.core.errors import ConfigError

COMMAND = (sys.executable, "-m", "router")
READY_TIMEOUT_S = 300.0  # the first start may convert or download a model
STOP_TIMEOUT_S = 6.0  # the router itself takes less than 5
LOOK_S = 0.1  # a wait notices the wish to stop this soon
USAGE_ERROR = 2  # exit status of a process that was started with wrong settings


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses (host:port) at which the router listens, and the pid of its process."""

    http: str
    grpc: str
    link: str
    admin: str
    pid: int


class RouterProcess:
    """One router. `start` may be called again after `stop`. Only one thread calls it."""

    def __init__(
        self, settings: config.RouterProcessConfig, *, folder: Path, log: Path, command: Sequence[str] = COMMAND
    ) -> None:
        self.settings = settings  # these have the real ports once the router is ready
        self._file = folder / "router.yaml"
        self._log = log
        self._command = tuple(command)
        self._child: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._lines: queue.Queue[tuple[float, str | None]] = queue.Queue()
        self._log_start = 0
        self._began = 0.0
        self.start_s = 0.0  # seconds that the last start took until the router was ready

    def start(self) -> None:
        """Spawn the process, without waiting for it. Raises `ClusterError` when it cannot be run at all."""
        assert self._child is None
        self._began = time.monotonic()
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # the file holds the cluster's token
        with os.fdopen(descriptor, "w") as file:
            file.write(config.dump(self.settings))
        self._lines = queue.Queue()
        with self._log.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._child = subprocess.Popen(
                    [*self._command, "--config", str(self._file), "--exit-with-parent"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,
                    env=environment(),
                )
            except OSError as exc:
                raise ClusterError(f"cannot run the router: {exc.strerror}") from exc
        assert self._child.stdout is not None
        self._reader = threading.Thread(target=_read_lines, args=(self._child.stdout, self._lines), daemon=True)
        self._reader.start()

    def wait_ready(self, stop: threading.Event, timeout_s: float = READY_TIMEOUT_S) -> Endpoints:
        """Wait for the one line that the ready router prints, and return its addresses.

        Raises `Interrupted` when `stop` is set, `ConfigError` when the router refuses its settings, and `ClusterError` when
        the router ends otherwise or is not ready after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if stop.is_set():
                raise Interrupted
            with contextlib.suppress(queue.Empty):
                came, line = self._lines.get(timeout=LOOK_S)
                self.start_s = came - self._began
                return self._endpoints(line)
        raise ClusterError(f"the router was not ready after {timeout_s:.0f} s; see {self._log}")

    def _endpoints(self, line: str | None) -> Endpoints:
        if line is None:
            raise self._failure()
        try:
            ready = json.loads(line)
            endpoints = Endpoints(ready["http"], ready["grpc"], ready["link"], ready["admin"], ready["pid"])
        except (ValueError, KeyError, TypeError) as exc:
            raise ClusterError(f"the router said {line!r} instead of its addresses") from exc
        self.settings = dataclasses.replace(self.settings, router=_at_ports(self.settings.router, endpoints))
        return endpoints

    def _failure(self) -> ConfigError | ClusterError:
        """Return the reason why the router ended before it was ready: its own `error:` line when there is one."""
        status = self.exit_status(wait_s=STOP_TIMEOUT_S)
        with self._log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").splitlines()
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        if said and status == USAGE_ERROR:
            return ConfigError(said[-1])
        return ClusterError(said[-1] if said else f"the router exited with status {status} while starting; see {self._log}")

    def exit_status(self, wait_s: float = 0.0) -> int | None:
        """Wait for at most `wait_s` and return the exit status; None while the router runs."""
        assert self._child is not None
        try:
            return self._child.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    @property
    def pid(self) -> int | None:
        """The pid of the child; None while there is none."""
        return None if self._child is None else self._child.pid

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the router with SIGTERM, and after `timeout_s` with SIGKILL. Idempotent."""
        child = self._child
        if child is None:
            return
        assert child.stdin is not None
        child.terminate()
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        assert self._reader is not None
        self._reader.join(timeout=1.0)  # the pipe's other end is closed: it reads the end of the file
        self._child = None

    def kill(self) -> None:
        """End it and what it started, from any thread, without waiting."""
        if (child := self._child) is not None:
            started = processes.descendants(child.pid)
            child.kill()
            processes.kill(started)


def _read_lines(stream: IO[bytes], lines: queue.Queue[tuple[float, str | None]]) -> None:
    """Queue each line of the router's output with the time it came, and None at the end. So the pipe never fills up."""
    with stream:
        for line in stream:
            lines.put((time.monotonic(), line.decode(errors="replace").strip()))
    lines.put((time.monotonic(), None))


def _at_ports(router: config.RouterConfig, endpoints: Endpoints) -> config.RouterConfig:
    """Return the settings with the real ports, so that a restarted router listens where clients and workers expect it."""
    ports: dict[str, Any] = {
        f"{name}_port": int(getattr(endpoints, name).rpartition(":")[2]) for name in ("http", "grpc", "link", "admin")
    }
    return dataclasses.replace(router, **ports)


def environment() -> dict[str, str]:
    """Return our environment, extended so that the child imports this very pdserve from any working directory."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}
