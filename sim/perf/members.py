"""The workers of an elastic cluster as processes, which are started, serve, change their roles, drain and go."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Final

from pdserve.core.ids import WorkerId
from pdserve.core.worker import Role
from pdserve.planner import resizing
from sim.perf.workers import PerfWorker, PerfWorkerShape


class MemberPhase(Enum):
    """The state of one process."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    FLIPPING = "flipping"
    """It drains in its old role, and then goes on in the other role."""
    CHANGING = "changing"
    """It has left its old role and has not joined in the new role."""
    GONE = "gone"


class Happening(Enum):
    """The events that change a phase."""

    LOADED = "loaded"
    CANCELLED = "cancelled"
    DRAIN = "drain"
    FLIP = "flip"
    EMPTY = "empty"


_P, _H = MemberPhase, Happening
MOVES: Final = {
    (_P.STARTING, _H.LOADED): _P.SERVING,
    (_P.STARTING, _H.CANCELLED): _P.GONE,
    (_P.SERVING, _H.DRAIN): _P.DRAINING,
    (_P.SERVING, _H.FLIP): _P.FLIPPING,
    (_P.DRAINING, _H.EMPTY): _P.GONE,
    (_P.FLIPPING, _H.EMPTY): _P.CHANGING,
    (_P.CHANGING, _H.LOADED): _P.SERVING,
}

_FOR_STEPS: Final = {
    _P.STARTING: resizing.Phase.LOADING,
    _P.SERVING: resizing.Phase.SERVING,
    _P.DRAINING: resizing.Phase.LEAVING,
    _P.FLIPPING: resizing.Phase.SETTLING,
    _P.CHANGING: resizing.Phase.SETTLING,
}


@dataclass(slots=True, eq=False)
class PerfMember:
    """One process and its present life as a worker."""

    worker_id: WorkerId
    role: Role
    """The role that it serves in. It is the new role from the moment of a flip."""
    shape: PerfWorkerShape
    began_s: float
    phase: MemberPhase = MemberPhase.STARTING
    worker: PerfWorker | None = None

    def move(self, happening: Happening) -> None:
        """Change the phase. Raises KeyError for what cannot happen in this phase."""
        self.phase = MOVES[self.phase, happening]


def for_steps(members: Iterable[PerfMember]) -> list[resizing.PoolMember]:
    """Return the members as the choice of the next steps wants them."""
    return [
        resizing.PoolMember(
            one.worker_id,
            one.role,
            _FOR_STEPS[one.phase],
            ready=one.phase is MemberPhase.SERVING,
            work=one.worker.load().running_sequences if one.worker is not None else 0.0,
            since_s=one.began_s,
        )
        for one in members
    ]
