"""What a cluster tells whoever watches it. Plain data: the command line draws it, tests compare it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """What starts by itself; `WORKERS` also covers their joining of the router."""

    RAY = "Ray"
    ROUTER = "router"
    WORKERS = "workers"


class WorkerPhase(Enum):
    STARTING = "starting"  # Ray has been asked for its process
    WAITING = "waiting for a node"  # none has room for it now; the detail says what is missing
    LOADING = "loading"  # its process runs
    LOADED = "loaded"  # the model is in memory and the services are up
    READY = "ready"  # the router may place requests on it
    RESTARTING = "restarting"  # its process died; another follows after a wait
    DRAINED = "drained and left"  # an operator asked for it: nobody starts it again
    DEAD = "dead"  # for good


@dataclass(frozen=True, slots=True)
class PartStarted:
    part: Part


@dataclass(frozen=True, slots=True)
class PartReady:
    """`seconds` since its start; parts start side by side, so these do not add up."""

    part: Part
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    worker_id: str
    phase: WorkerPhase
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RouterLost:
    """The router's process died; it comes back at the same addresses after `delay_s`."""

    detail: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class RouterBack:
    pid: int


@dataclass(frozen=True, slots=True)
class LogsKept:
    """A failure: its logs stay in a folder that was made for them, which nobody would find unless told."""

    folder: str


Event = PartStarted | PartReady | WorkerChanged | RouterLost | RouterBack | LogsKept
Listener = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """The listener of those who do not care."""
