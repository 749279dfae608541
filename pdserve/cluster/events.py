"""The events that a cluster sends to its listener. They are plain data: the command line draws them, tests compare them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from pdserve.worker.start_report import LoadState

log = logging.getLogger(__name__)


class EventPart(Enum):
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
    DEAD = "dead"  # it died too often; the actuator asks for another one later
    CANCELLED = "cancelled"  # it served nobody yet, and its pool needs it no more
    DRAINING = "draining"  # its pool needs it no more; it finishes what it has
    FLIPPING = "changing its role"  # it drains, and then serves in the other role with the weights that it has


class PolicyFault(Enum):
    """The ways in which a scaling policy of the operator's own fails. All keep the size of its pool."""

    RAISED = "raised"
    NOT_A_SIZE = "not_a_size"
    LATE = "late"  # this one and those below end its process, and another one is started
    ENDED = "ended"  # the process is gone, or wrote what no policy's process writes
    CANNOT_START = "cannot_start"
    NO_PROCESS = "no_process"  # the machine has no room for one


@dataclass(frozen=True, slots=True)
class PartStarted:
    """The start of a part has begun."""

    part: EventPart


@dataclass(frozen=True, slots=True)
class PartReady:
    """A part is ready, `seconds` after its start. Parts start at the same time, so the sum means nothing."""

    part: EventPart
    seconds: float


@dataclass(frozen=True, slots=True)
class WorkerChanged:
    """A worker entered a phase. `detail` adds the reason or the place; it may be empty."""

    worker_id: str
    phase: WorkerPhase
    detail: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLoads:
    """A worker that loads its model has come so far."""

    worker_id: str
    state: LoadState


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
class RayLost:
    """Ray is gone, or does not answer. Workers go on, and pools keep their sizes until Ray is back, which is tried for ever."""

    detail: str


@dataclass(frozen=True, slots=True)
class RayBack:
    """Ray was joined again, and the workers that run were handed to it."""


@dataclass(frozen=True, slots=True)
class StartedWithout:
    """The cluster serves, though these workers are not ready. They are started again as if they had died later."""

    worker_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RouterAdopted:
    """The router of an earlier `pdserve up` serves with the settings of now, and goes on as process `pid`."""

    pid: int


@dataclass(frozen=True, slots=True)
class RouterReplaced:
    """The router of an earlier `pdserve up`, process `pid`, is stopped, and another one started in its place."""

    pid: int
    why: str


@dataclass(frozen=True, slots=True)
class LogsKept:
    """The cluster failed, and its logs stay in a temporary folder. Nobody would find that folder without this event."""

    folder: str


@dataclass(frozen=True, slots=True)
class PoolsResized:
    """The wanted sizes of the pools have changed, or an order to change them was refused. `text` says why."""

    text: str
    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class ActuatorReplaced:
    """Another process changes the sizes of the pools from now on, so this one keeps its workers and changes nothing more."""

    detail: str


@dataclass(frozen=True, slots=True)
class PolicyChanged:
    """A scaling policy of the operator's own fails in a new way, or (None) gives sizes again. `text` says which one and why."""

    text: str
    fault: PolicyFault | None


Event = (
    PartStarted
    | PartReady
    | WorkerChanged
    | WorkerLoads
    | RouterLost
    | RouterBack
    | RayLost
    | RayBack
    | StartedWithout
    | RouterAdopted
    | RouterReplaced
    | LogsKept
    | PoolsResized
    | ActuatorReplaced
    | PolicyChanged
)
Listener = Callable[[Event], None]


def ignore(_event: Event) -> None:
    """Do nothing with the event."""


def tell(listener: Listener, event: Event) -> None:
    """Call the listener. A listener that fails ends nothing, because the cluster also serves those who do not watch it."""
    try:
        listener(event)
    except Exception:
        log.exception("a listener of the cluster failed")
