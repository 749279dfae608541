"""Faults for a cluster of real processes, and the supervisor that restarts members as `pdserve up` does."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Final

from testkit.processes import Process, ProcessCluster

LOOK_S: Final = 0.1
MAX_RESTARTS: Final = 500  # for all members together; a member that dies at every start must not be restarted for ever


class Fault(Enum):
    """A fault that may hit one member: SIGKILL or SIGSTOP."""

    KILL = "kill"
    STOP = "stop"


def strike(fault: Fault, process: Process) -> None:
    """Let a fault hit a process. It has happened when this returns."""
    if fault is Fault.KILL:
        process.kill()
    else:
        process.pause()


@dataclass(frozen=True, slots=True)
class Restart:
    """One restart of a member that had ended. `status` is its exit status, or a signal's number, negative."""

    name: str
    status: int

    @property
    def aborted(self) -> bool:
        """The member ended by a crash of its own. No test sends these signals."""
        return self.status in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)


class Supervisor:
    """Restarts every member that has ended, from a thread of its own. Use it as a context manager."""

    def __init__(self, cluster: ProcessCluster) -> None:
        self.restarts: list[Restart] = []
        self.error: BaseException | None = None
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)

    def __enter__(self) -> Supervisor:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(LOOK_S):
                self._look()
        except BaseException as exc:  # noqa: BLE001 - the owner of the supervisor looks at it
            self.error = exc

    def _look(self) -> None:
        for name, process in list(self._cluster.processes.items()):
            if process.alive:
                continue
            if len(self.restarts) >= MAX_RESTARTS:
                raise RuntimeError(f"{MAX_RESTARTS} restarts; the last was {name}: {process.log()[-2000:]}")
            self.restarts.append(Restart(name, process.popen.returncode))
            self._cluster.start(name, wait=False)
