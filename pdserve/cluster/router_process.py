"""The router as a process of its own. It is started, found again, restarted at the same ports, and stopped.

It has a session of its own, so that Ctrl-C on a terminal reaches only us and we stop things in order. A *bound* router also
reads a pipe whose other end we hold, so it ends when we do, however we end. A *lasting* one goes on without us, and whoever
comes next adopts it by its pid and start time. Both say that they are ready in a file, which outlives whoever waits for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from pdserve import config
from pdserve.cluster import processes
from pdserve.cluster.errors import ClusterError, Interrupted
from pdserve.cluster.record import ProcessId, make_private
from pdserve.cluster.router.ports import NAMES, at_ports
from pdserve.core.errors import ConfigError
from pdserve.killable_child import environment
from pdserve.observe.log_files import open_log

COMMAND = (sys.executable, "-m", "router")
READY_TIMEOUT_S = 300.0  # the first start may convert or download a model
STOP_TIMEOUT_S = 6.0  # a router without streams takes less than 5
KILL_TIMEOUT_S = 5.0  # the kernel ends a killed process within a moment, unless it waits for a disk
LOOK_S = 0.05  # a wait notices this soon that the router is ready, or the wish to stop
USAGE_ERROR = 2  # exit status of a process that was started with wrong settings


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The addresses (host:port) at which the router listens, and the pid of its process."""

    http: str
    grpc: str
    link: str
    admin: str
    pid: int
    metrics: str = ""


class RouterProcess:
    """One router. `start` may be called again after `stop`. Only one thread calls it, but for `kill`.

    lasting: the router goes on when this process ends. variables: are added to its environment.
    """

    def __init__(
        self,
        settings: config.RouterProcessConfig,
        *,
        folder: Path,
        log: Path,
        command: Sequence[str] = COMMAND,
        lasting: bool = False,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.settings = settings  # these have the real ports once the router is ready
        self._file = folder / "router.yaml"
        self._said = folder / "router.ready"
        self._log = log
        self._command = tuple(command)
        self._lasting = lasting
        self._variables = dict(variables)
        self._child: subprocess.Popen[bytes] | None = None  # None as well for a router that was adopted
        self.process: ProcessId | None = None  # the router that runs, or ran last and was not stopped
        self._log_start = 0
        self._began = 0.0
        self.start_s = 0.0  # seconds that the last start took until the router was ready

    def start(self) -> None:
        """Spawn the process, without waiting for it. Its folder is made again if somebody has removed it.

        Raises `ClusterError` when the process cannot be run, or a file of it cannot be written.
        """
        assert self.process is None
        self._began = time.monotonic()
        try:
            child = self._spawn()
        except OSError as exc:
            raise ClusterError(f"cannot run the router: {exc.filename or self._file.parent}: {exc.strerror}") from exc
        except ConfigError as exc:
            raise ClusterError(f"cannot run the router: {exc.message}") from exc
        self._child = child
        self.process = ProcessId.of(child.pid) or ProcessId(child.pid, 0)  # the second: it has ended already

    def _spawn(self) -> subprocess.Popen[bytes]:
        if not self._file.parent.is_dir():  # one that is there may be that of a private Ray, which opens it to others
            make_private(self._file.parent)
        descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # the file holds the cluster's token
        with os.fdopen(descriptor, "w") as file:
            file.write(config.dump(self.settings))
        with open_log(self._log) as log, self._said.open("wb") as said:
            self._log_start = os.fstat(log.fileno()).st_size
            return subprocess.Popen(
                [*self._command, *self._arguments],
                stdin=subprocess.DEVNULL if self._lasting else subprocess.PIPE,
                stdout=said,
                stderr=log,
                start_new_session=True,
                env=environment() | self._variables,
            )

    @property
    def _arguments(self) -> list[str]:
        bound = [] if self._lasting else ["--exit-with-parent"]
        return ["--config", str(self._file), "--log-file", str(self._log), *bound]

    def use(self, router: config.RouterConfig) -> None:
        """Let the next start use these settings of the router."""
        self.settings = dataclasses.replace(self.settings, router=router)

    def adopt(self, process: ProcessId, endpoints: Endpoints | None) -> None:
        """Take over a router that another process started. `endpoints` None: it is only to be stopped."""
        assert self.process is None
        self.process = process
        if endpoints is not None:
            self._at(endpoints)

    def wait_ready(self, stop: threading.Event, timeout_s: float = READY_TIMEOUT_S) -> Endpoints:
        """Wait for the one line that the ready router prints, and return its addresses.

        Raises `Interrupted` when `stop` is set, `ConfigError` when the router refuses its settings, and `ClusterError` when
        the router ends otherwise or is not ready after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if (endpoints := self.ready()) is not None:
                return endpoints
            if stop.wait(LOOK_S):
                raise Interrupted
        raise ClusterError(f"the router was not ready after {timeout_s:.0f} s; see {self._log}")

    def ready(self) -> Endpoints | None:
        """Return the addresses of the router that was started, None while it is not ready. Raises as `wait_ready` does."""
        ended = self.ended() is not None  # before the file is read: it says what it has to say first
        try:
            line = self._said.read_text(errors="replace")
        except OSError as exc:
            raise ClusterError(f"cannot read whether the router is ready: {self._said}: {exc.strerror}") from exc
        if not line.endswith("\n"):
            if ended:
                raise self._failure()
            return None
        try:
            ready = json.loads(line)
            addresses = ready["http"], ready["grpc"], ready["link"], ready["admin"]
            endpoints = Endpoints(*addresses, ready["pid"], ready["metrics"])
        except (ValueError, KeyError, TypeError) as exc:
            raise ClusterError(f"the router said {line.strip()!r} instead of its addresses") from exc
        self.start_s = time.monotonic() - self._began
        self._at(endpoints)
        return endpoints

    def _at(self, endpoints: Endpoints) -> None:
        """Keep the real ports, so that a restarted router listens where clients and workers expect it."""
        addresses = {name: getattr(endpoints, name) for name in NAMES}
        ports = {name: int(address.rpartition(":")[2]) for name, address in addresses.items() if address}
        self.use(at_ports(self.settings.router, ports))

    def _failure(self) -> ConfigError | ClusterError:
        """Return the reason why the router ended before it was ready: its own `error:` line when there is one."""
        status = self.exit_status(wait_s=STOP_TIMEOUT_S)
        said = self.error_line()
        if said and status == USAGE_ERROR:
            return ConfigError(said)
        return ClusterError(said or f"the router exited with status {status} while starting; see {self._log}")

    def error_line(self) -> str:
        """Return the last `error:` line that the router wrote since its start; empty when there is none, or no file."""
        if not self._log.is_file():
            return ""
        try:
            with self._log.open("rb") as log:
                if os.fstat(log.fileno()).st_size >= self._log_start:  # otherwise it was emptied meanwhile
                    log.seek(self._log_start)
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return said[-1] if said else ""

    def exit_status(self, wait_s: float = 0.0) -> int | None:
        """Wait for at most `wait_s` and return the exit status; None while the router runs, and for an adopted one."""
        if self._child is None:
            return None
        try:
            return self._child.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def ended(self) -> str | None:
        """Tell how the router ended; None while it runs."""
        if (status := self.exit_status()) is not None:
            return f"exit status {status}"
        return None if self.process is not None and self.process.alive else "it ended by itself"

    @property
    def pid(self) -> int | None:
        """The pid of the router; None while there is none."""
        return None if self.process is None else self.process.pid

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End the router with SIGTERM, and after `timeout_s` with SIGKILL, together with what it started. Idempotent."""
        if self.process is None:
            return
        self.process.send(signal.SIGTERM)
        if not self._gone(timeout_s):
            self.kill()
            self._gone(KILL_TIMEOUT_S)
        self.forget()

    def forget(self) -> None:
        """Know the router no more. A lasting router that runs goes on. Idempotent."""
        child, self._child, self.process = self._child, None, None
        if child is not None and child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()

    def _gone(self, timeout_s: float) -> bool:
        """Wait for the end of the process. False: it runs after `timeout_s`."""
        if self._child is not None:
            return self.exit_status(timeout_s) is not None
        deadline = time.monotonic() + timeout_s
        while self.process is not None and self.process.alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_S)
        return True

    def kill(self) -> None:
        """End it and what it started, also if it was stopped by SIGSTOP. Any thread may call it, and it does not wait."""
        if (process := self.process) is not None and process.alive:
            started = processes.descendants(process.pid)
            process.send(signal.SIGKILL)
            processes.kill(started)
