"""The observer of every protocol step of a run. For a cell of the matrix it causes one fault at one of the steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from sim.faults.faults import Fault, FaultKind
from sim.world.network import Fate
from sim.world.process import Process

if TYPE_CHECKING:
    from sim.faults.client import ClientAsk
    from sim.faults.worker import SimWorker
    from sim.faults.world import World

STALL_S: Final = 1.2
"""A stall that is too short to make the process lost. Of the protocol's other waits, only a lease is longer."""
LONG_STALL_S: Final = 4.0
"""A stall that makes the process lost and lets its leases expire."""
RANK_BACK_S: Final = 0.5
"""A worker that has ended with its rank is started again after this time, as one that was killed."""


class Act(Enum):
    """The fault that happens at a step."""

    KILL = "kill"
    RANK = "rank"
    STALL = "stall"
    LONG_STALL = "long stall"
    DROP = "drop"
    DUPLICATE = "duplicate"
    FLIP = "flip"
    POISON = "poison"


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the matrix: at occurrence `nth` (from 0) of `step`, the fault `act` hits the `actor` (a role).

    For a message, a fault hits the sender before it sends and the receiver before it handles the message. DROP and
    DUPLICATE hit the message itself, on its way from `actor`. RANK lets rank 1 of a worker die, and the worker after it. FLIP
    lets a worker drain and take its other role. POISON lets a request that is computed at this step end the worker, and every
    other worker that computes it from then on.
    """

    step: str
    actor: str
    act: Act
    nth: int = 0
    rough: bool = False
    """True: the scenario with refusals, cancellations and drains, which has steps that the calm scenario lacks."""

    def __str__(self) -> str:
        """Write the cell as the command line takes it."""
        return f"{self.step}:{self.actor}:{self.act.name}:{self.nth}:{'rough' if self.rough else 'calm'}"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Read the form that `str` writes."""
        step, actor, act, nth, scenario = text.split(":")
        return cls(step, actor, Act[act], int(nth), scenario == "rough")


class Census:
    """The count of steps by actor. With a `cell`, it also makes the fault of that cell happen, once."""

    def __init__(self, cell: Cell | None = None) -> None:
        self.world: World | None = None
        self.sent: Counter[tuple[str, str]] = Counter()
        self.arrived: Counter[tuple[str, str]] = Counter()
        self.hits = 0
        self.victim = ""
        self._cell = cell
        self._seen = 0

    def sending(self, step: str, src: Process, dst: Process) -> Fate:
        """Count a message that is about to be sent, and decide its fate."""
        self.sent[step, src.role] += 1
        act = self._act(step, src)
        if act is Act.DROP:
            return Fate.DROP
        return Fate.DUPLICATE if act is Act.DUPLICATE else Fate.PASS

    def arriving(self, step: str, src: Process, dst: Process) -> None:
        """Count a message that is about to be handled."""
        self.arrived[step, dst.role] += 1
        if self._cell is not None and self._cell.act not in (Act.DROP, Act.DUPLICATE):
            self._act(step, dst)

    def reached(self, step: str, process: Process) -> None:
        """Count a step that is not a message."""
        self.sent[step, process.role] += 1
        self._act(step, process)

    def _act(self, step: str, actor: Process) -> Act | None:
        cell = self._cell
        if cell is None or (step, actor.role) != (cell.step, cell.actor) or self.hits:
            return None
        if cell.act is Act.POISON and not self._computed(actor):
            return None  # only a probe runs there
        self._seen += 1
        if self._seen <= cell.nth:
            return None
        self.hits += 1
        self.victim = actor.name
        if cell.act is Act.FLIP:
            self._flip(actor)
        elif cell.act is Act.POISON:
            worker, ask = self._computed(actor)[0]
            assert self.world is not None
            self.world.poison.add(ask.name, ask.params.seed, 0)
            worker.end_by(ask.name)
        elif cell.act is Act.KILL:
            actor.kill()
        elif cell.act is Act.RANK:
            assert self.world is not None
            self.world.inject(Fault(self.world.timeline.now_s, FaultKind.RANK, actor.name, RANK_BACK_S, other="1"))
        elif cell.act is Act.STALL:
            actor.stop(STALL_S)
        elif cell.act is Act.LONG_STALL:
            actor.stop(LONG_STALL_S)
        return cell.act

    def _flip(self, actor: Process) -> None:
        """Ask a worker for its other role, as the router or an operator would at this moment."""
        actor.loop.post(0.0, self._worker(actor).flip)

    def _worker(self, actor: Process) -> SimWorker:
        assert self.world is not None
        return next(worker for worker in self.world.workers.values() if worker.process is actor)

    def _computed(self, actor: Process) -> list[tuple[SimWorker, ClientAsk]]:
        """Return the requests of clients that a worker computes."""
        assert self.world is not None
        worker = self._worker(actor)
        asks = {client.outcome.ask.params.seed: client.outcome.ask for client in self.world.clients}
        return [(worker, asks[seed]) for seed in worker.engine.seeds if seed in asks]
