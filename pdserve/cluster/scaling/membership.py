"""The membership of both pools: the processes that the supervisor knows, joined with the workers that the router knows. Pure.

The router's word counts for workers that are linked: it alone places requests. The supervisor's counts for all others. What
the actuator has asked for is remembered as marks, each for one incarnation, so a mark never outlives the worker that it means:
a drain or a flip that was lost together with the router is simply seen as not having begun.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdserve.cluster.member import Member, MemberState
from pdserve.core.worker import Role
from pdserve.planner.observe import WorkerReading
from pdserve.planner.resizing import Phase, PoolMember


@dataclass(frozen=True, slots=True)
class Moved:
    """A worker serves in a role that its plan does not have, so its next process should start in this one."""

    worker_id: str
    role: Role
    ours: bool
    """The actuator had asked for a flip of the worker."""
    settled: frozenset[Role] = frozenset()
    """The pools that keep their sizes: an operator has ordered them since the worker began to drain."""


@dataclass(slots=True)
class Marks:
    """The requests that the actuator has made of workers, by worker_id, with the incarnation that it asked."""

    drains: dict[str, int] = field(default_factory=dict)
    flips: dict[str, tuple[int, Role]] = field(default_factory=dict)
    obstacles: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The reasons why workers refused to change their role."""
    ordered: dict[str, tuple[int, frozenset[Role]]] = field(default_factory=dict)
    """The workers that drained already when an operator ordered sizes, and the pools whose sizes the order gave."""
    joined: set[str] = field(default_factory=set)
    """The workers whose present process was linked to a router once."""

    def settled(self, worker_id: str) -> frozenset[Role]:
        """Return the pools whose sizes do not change any more when this worker leaves or changes its role."""
        return self.ordered.get(worker_id, (0, frozenset()))[1]

    def note_order(self, roles: Iterable[Role], workers: Iterable[WorkerReading]) -> None:
        """Note that an order has just given the sizes of these pools: they count without the workers that drain now."""
        for worker in workers:
            if worker.draining:
                name = str(worker.hello.worker_id)
                self.ordered[name] = (worker.hello.incarnation, self.settled(name) | set(roles))


def reconcile(members: Sequence[Member], workers: Iterable[WorkerReading], marks: Marks) -> list[Moved]:
    """Drop the marks that have become true or void, and return the workers that serve in another role than planned."""
    linked = {str(worker.hello.worker_id): worker for worker in workers}
    running = {member.worker_id for member in members if member.state is MemberState.RUNNING}
    marks.joined = {name for name in running if name in linked or name in marks.joined}
    moved = []
    for member in members:
        name = member.worker_id
        worker = linked.get(name) if name in running else None
        asked = marks.flips.get(name)
        if name not in running:  # a process that has ended ends what was asked of it; its plan has the new role already
            marks.flips.pop(name, None)
        elif worker is not None and not (asked and _goes_on(worker, asked[0])):
            marks.flips.pop(name, None)
            if worker.hello.role.value != member.plan.role:
                moved.append(Moved(name, worker.hello.role, asked is not None, marks.settled(name)))
        if worker is not None and name in marks.drains and not _goes_on(worker, marks.drains[name]):
            del marks.drains[name]
        if worker is not None and name in marks.ordered and not _goes_on(worker, marks.ordered[name][0]):
            del marks.ordered[name]
        if worker is not None and name in marks.obstacles and marks.obstacles[name][0] != worker.hello.incarnation:
            del marks.obstacles[name]
    known = {member.worker_id for member in members}
    for marked in (marks.drains, marks.flips, marks.obstacles, marks.ordered):
        for name in [name for name in marked if name not in known]:
            del marked[name]
    return moved


def _goes_on(worker: WorkerReading, incarnation: int) -> bool:
    """Tell whether this incarnation still drains."""
    return worker.draining and worker.hello.incarnation == incarnation


def membership(
    members: Sequence[Member], workers: Sequence[WorkerReading], marks: Marks, *, automatic: bool
) -> list[PoolMember]:
    """Return all workers with their phases, from which the next steps are computed.

    automatic: the planner decides, so that a worker that an operator drains is replaced, and a worker that somebody else
    started counts. Otherwise nobody replaces the one, and nobody counts the other.
    """
    linked = {str(worker.hello.worker_id): worker for worker in workers}
    ours = {member.worker_id for member in members}
    made = [
        _member(member, linked.get(member.worker_id), marks, automatic)
        for member in members
        if member.state not in (MemberState.NEW, MemberState.GONE)
    ]
    strangers = [worker for name, worker in linked.items() if name not in ours] if automatic else []
    return made + [
        PoolMember(str(w.hello.worker_id), w.hello.role, Phase.LEAVING if w.draining else Phase.SETTLING) for w in strangers
    ]


def _member(member: Member, worker: WorkerReading | None, marks: Marks, automatic: bool) -> PoolMember:
    name, role = member.worker_id, Role(member.plan.role)
    if (
        member.state is MemberState.LOADING and worker is not None and worker.ready
    ):  # it serves before its supervisor has heard so
        return PoolMember(name, role, Phase.SETTLING, since_s=member.asked_s)
    if member.state is not MemberState.RUNNING:
        phase = Phase.LOADING if member.state is MemberState.LOADING else Phase.WAITING
        return PoolMember(name, role, phase, since_s=member.asked_s)
    if name in marks.flips:  # its plan has the new role already
        return PoolMember(name, role, Phase.SETTLING, since_s=member.asked_s)
    if worker is None:
        lost = Phase.LEAVING if name in marks.drains else Phase.SETTLING
        return PoolMember(name, role, lost if name in marks.joined else Phase.LOADING, since_s=member.asked_s)
    if worker.draining:
        leaves = automatic or name in marks.drains or role in marks.settled(name)
        return PoolMember(name, role, Phase.LEAVING if leaves else Phase.SETTLING, since_s=member.asked_s)
    refused = marks.obstacles.get(name, (0, ""))[1]
    return PoolMember(
        name,
        role,
        Phase.SERVING,
        incarnation=worker.hello.incarnation,
        ready=worker.ready,
        work=worker.load.running_sequences + worker.load.queued_requests + worker.load.leases_held,
        since_s=member.asked_s,
        obstacle=refused or worker.hello.flip_obstacle,
    )
