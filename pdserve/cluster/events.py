"""The events that a cluster sends to its listener. They are plain data: the command line draws them, tests compare them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class Part(Enum):
    """One part of a cluster that is started separately. `WORKERS` is ready when all workers have joined the router."""

    RAY = "Ray"
    ROUTER = "router"
    WORKERS = "workers"


class WorkerPhase(Enum):
    """The phase of one worker's life, as the operator sees it."""

    STARTING = "starting"  # Ray has been asked for its process
    WAITING = "waiting for a node"  # no node has room for it now; the detail says what is missing
    LOADING = "loading"  # its process runs and starts the worker
    LOADED = "loaded"  # the model is in memory and the services are up
    READY = "ready"  # the router may place requests on it
    RESTARTING = "restarting"  # its process died; another is started after a delay
    DRAINED = "drained and left"  # an operator drained it, so it is not started again
    DEAD = "dead"  # it died too often and is not started again


@dataclass(frozen=True, slots=True)
class PartStarted:
    """The start of a part has begun."""

    part: Part


@dataclass(frozen=True, slots=True)
class PartReady:
    """A part is ready, `seconds` after its start. Parts start at the same time, so the sum means nothing."""

    part: Part
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """A worker entered a phase. `detail` adds the reason or the place; it may be empty."""

    worker_id: str
    phase: WorkerPhase
    detail: str = ""


@dataclass(frozen=True, slots=True)
class RouterLost:
    """The router's process died. It is started again at the same addresses after `delay_s`."""

    detail: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class RouterBack:
    """The router runs again, as process `pid`."""

    pid: int


@dataclass(frozen=True, slots=True)
class LogsKept:
    """The cluster failed, and its logs stay in a temporary folder. Nobody would find that folder without this event."""

    folder: str


Event = PartStarted | PartReady | WorkerChanged | RouterLost | RouterBack | LogsKept
Listener = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Do nothing with the event."""
