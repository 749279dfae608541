"""A cluster for the actuator, on a clock of its own: real members, the router's real mailbox, and workers that do what they
are told, unless a fault hits them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import MagicMock

from pdserve.cluster import plan
from pdserve.cluster.events import Event, WorkerChanged, WorkerPhase
from pdserve.cluster.keeping.order import NodePlace
from pdserve.cluster.member import Member, MemberState
from pdserve.cluster.scaling.actuator import Actuator
from pdserve.cluster.scaling.port import PlanRefused, Poll, Replaced, Unanswered, _order
from pdserve.config import ClusterConfig
from pdserve.core.errors import PdserveError
from pdserve.core.worker import Role
from pdserve.rpc.v1 import common_pb2, inference_pb2, scaling_pb2
from router.grpc.scaling import ScalingMailbox

WIRE = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}
DRAIN_S = 3


@dataclass
class Worker:
    """One process: linked to the router while `linked`."""

    role: str
    incarnation: int
    linked: bool = True
    draining_s: int | None = None  # since when
    becomes: str = ""
    obstacle: str = ""  # which its Hello tells
    refuses: str = ""  # which only a flip finds out


@dataclass
class World:
    """Pool, router and workers together. `step` lets a second pass; `settle` many."""

    config: ClusterConfig
    now_s: float = 0.0
    members: list[Member] = field(default_factory=list)
    workers: dict[str, Worker] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    asked: list[tuple[str, ...]] = field(default_factory=list)
    cannot_start: set[str] = field(default_factory=set)  # roles
    router_up: bool = True
    before_step: Callable[[], None] = lambda: None
    poisoned: list[tuple[str, int]] = field(default_factory=list)  # the processes that a request has ended, as the router says
    lose: str = ""  # "request" or "answer" of the next drain or flip
    _numbers: int = 0

    def __post_init__(self) -> None:
        self.blueprint = plan.Blueprint(self.config, "h:1", "t", Path("logs"), plan.WORKER_ENTRIES)
        self.new_router()
        for planned in self.blueprint.plan_all():
            self._serve(Member(planned))
        self.actuator = Actuator(self.blueprint, self, self, self._listen)

    # the router

    def new_router(self) -> None:
        self.incarnation = self._number()
        self.mailbox = ScalingMailbox(self._number() << 20)
        self.term = 0

    def poll(self, report: scaling_pb2.ScalingReport) -> Poll | None:
        if not self.router_up:
            return None
        if self.term and self.incarnation != self.term_of:
            self.term = 0
        new, self.term_of = not self.term, self.incarnation
        request = scaling_pb2.ActuateRequest(actuator="up", term=self.term, report=report)
        assert request.ByteSize() < 64 << 10
        try:
            answer = self.mailbox.actuate(request, self.now_s)
        except PdserveError as exc:
            raise Replaced(str(exc)) from exc
        self.term = answer.term
        return Poll(self.state(), _order(answer) if answer.HasField("order") else None, new)

    def state(self) -> inference_pb2.GetClusterStateResponse:
        return inference_pb2.GetClusterStateResponse(
            router_incarnation=self.incarnation,
            workers=[
                inference_pb2.WorkerState(
                    hello=common_pb2.WorkerHello(
                        worker_id=name, role=WIRE[worker.role], incarnation=worker.incarnation, flip_obstacle=worker.obstacle
                    ),
                    ready=worker.draining_s is None,
                    draining=worker.draining_s is not None,
                )
                for name, worker in self.workers.items()
                if worker.linked
            ],
            scaling=self.mailbox.state(self.now_s),
            poisoned_workers=[inference_pb2.PoisonedWorker(worker_id=name, pid=pid) for name, pid in self.poisoned],
        )

    def order(self, *, automatic: bool = False, **sizes: int) -> int:
        return self.mailbox.scale(scaling_pb2.ScaleRequest(automatic=automatic, **sizes), self.now_s)

    def drain(self, worker_id: str, incarnation: int) -> None:
        self._told("drain", worker_id, incarnation)

    def flip(self, worker_id: str, incarnation: int, role: Role) -> None:
        self._told("flip", worker_id, incarnation, role.value)

    def _told(self, what: str, worker_id: str, incarnation: int, becomes: str = "") -> None:
        self.before_step()
        lose, self.lose = self.lose, ""
        if lose == "request" or not self.router_up:
            raise Unanswered("the connection broke")
        worker = self.workers.get(worker_id)
        if worker is None or not worker.linked or worker.incarnation != incarnation:
            raise PlanRefused("it is another one now", stale=True)
        self.mailbox.check_term(self.term)
        if what == "flip" and (worker.obstacle or worker.refuses):
            raise PlanRefused(worker.obstacle or worker.refuses, stale=False)
        self.asked.append((what, worker_id))
        left, wanted = self.sizes()[worker.role == "decode"] - 1, getattr(self.actuator.wanted.sizes, worker.role)
        assert worker.draining_s is not None or left >= wanted, f"{what} {worker_id} leaves {left} of {wanted}"
        worker.draining_s, worker.becomes = 0, becomes
        if lose == "answer":
            raise Unanswered("the connection broke")

    # the pool

    def add(self, planned: plan.WorkerPlan) -> None:
        assert planned.worker_id not in {member.worker_id for member in self.members} | set(self.workers)
        self.asked.append(("start", planned.worker_id))
        member = Member(planned)
        self.members.append(member)
        member.asked(MagicMock(), None, self.now_s)

    def cancel(self, worker_id: str) -> None:
        member = self.member(worker_id)
        assert worker_id not in self.workers
        assert member.state is not MemberState.GONE
        self.asked.append(("cancel", worker_id))
        self.members.remove(member)

    def forget(self, worker_id: str) -> None:
        self.members.remove(self.member(worker_id))

    def move(self, worker_id: str, planned: plan.WorkerPlan) -> None:
        self.member(worker_id).replan(planned)

    def forgive(self, worker_id: str, pid: int) -> None:
        self.asked.append(("forgive", worker_id))
        self.member(worker_id).forgive(pid)

    def member(self, worker_id: str) -> Member:
        return next(member for member in self.members if member.worker_id == worker_id)

    # time

    def step(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now_s += 1.0
            for member in list(self.members):
                self._advance(member)
            self.actuator.tick(self.now_s)

    def die(self, worker_id: str) -> None:
        member = self.member(worker_id)
        self.workers.pop(worker_id, None)
        if (
            member.state in (MemberState.PLACING, MemberState.LOADING, MemberState.RUNNING)
            and member.died(self.now_s, counts=True) is None
        ):
            self._listen(WorkerChanged(worker_id, WorkerPhase.DEAD, "given up"))

    def close(self) -> None:
        pass

    def sizes(self) -> tuple[int, int]:
        """Workers that take requests."""
        serving = [w.role for w in self.workers.values() if w.linked and w.draining_s is None]
        return serving.count("prefill"), serving.count("decode")

    def _serve(self, member: Member) -> None:
        self.members.append(member)
        member.asked(MagicMock(), None, self.now_s)
        member.placed(NodePlace("node", "host"), self.now_s)
        member.loaded(MagicMock(), self.now_s)
        self._link(member)

    def _link(self, member: Member) -> None:
        obstacle = member.plan.config.flip_obstacle
        self.workers[member.worker_id] = Worker(member.plan.role, self._number(), obstacle=obstacle)

    def _advance(self, member: Member) -> None:
        worker = self.workers.get(member.worker_id)
        if member.state is MemberState.BACKING_OFF and self.now_s >= member.again_s:
            member.asked(MagicMock(), None, self.now_s)
        elif member.state is MemberState.PLACING:
            member.placed(NodePlace("node", "host"), self.now_s)
        elif member.state is MemberState.LOADING and member.plan.role in self.cannot_start:
            self.die(member.worker_id)
        elif member.state is MemberState.LOADING:
            member.loaded(MagicMock(), self.now_s)
            self._link(member)
        elif worker is not None and worker.draining_s is not None:
            worker.draining_s += 1
            if worker.draining_s >= DRAIN_S and worker.becomes:
                self.workers[member.worker_id] = Worker(worker.becomes, self._number())
            elif worker.draining_s >= DRAIN_S:
                del self.workers[member.worker_id]
                member.gone(self.now_s)

    def _listen(self, event: Event) -> None:
        self.events.append(event)
        if hasattr(self, "actuator"):
            self.actuator.hear(event)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers
