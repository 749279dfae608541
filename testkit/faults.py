"""Harm to a cluster of real processes, and the supervisor that heals it as `pdserve up` does."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Final

from testkit.processes import Process, ProcessCluster

LOOK_S: Final = 0.1
MAX_RESTARTS: Final = 500  # of all members together: a member that dies at every start must not spin for ever


class Fault(Enum):
    """What can be done to one member at one moment."""

    KILL = "kill"
    STOP = "stop"


def strike(fault: Fault, process: Process) -> None:
    """It has happened when this returns."""
    if fault is Fault.KILL:
        process.kill()
    else:
        process.pause()


@dataclass(frozen=True, slots=True)
class Restart:
    """A member had ended with `status` (a signal's number, negative, or an exit status) and was started again."""

    name: str
    status: int

    @property
    def aborted(self) -> bool:
        """It died of itself: nobody sent it SIGABRT or SIGSEGV."""
        return self.status in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)


class Supervisor:
    """Starts every member again that has ended, from a thread of its own. Use as a context manager."""

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
        except BaseException as exc:  # noqa: BLE001 - for whoever owns the supervisor
            self.error = exc

    def _look(self) -> None:
        for name, process in list(self._cluster.processes.items()):
            if process.alive:
                continue
            if len(self.restarts) >= MAX_RESTARTS:
                raise RuntimeError(f"{MAX_RESTARTS} restarts; the last was {name}: {process.log()[-2000:]}")
            self.restarts.append(Restart(name, process.popen.returncode))
            self._cluster.start(name, wait=False)
