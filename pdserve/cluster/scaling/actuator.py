"""The one actuator of a cluster. It polls the router and takes the steps that bring both pools to their wanted sizes.

Each poll gives a membership, and steps are taken only against the membership from which they were computed: a step that the
router refuses, because a worker has another incarnation or is gone, ends the round, and the next poll plans anew. An actuator
that another one has replaced takes no step any more. Only the thread that joined Ray calls it.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Final, Protocol

from pdserve.cluster.backoff import Backoff
from pdserve.cluster.events import ActuatorReplaced, Event, Listener, PolicyChanged, PoolsResized, WorkerChanged, WorkerPhase
from pdserve.cluster.member import Member, MemberState
from pdserve.cluster.plan import Blueprint, WorkerPlan, configured_sizes
from pdserve.cluster.scaling.limits import limits_of
from pdserve.cluster.scaling.membership import Marks, membership, reconcile
from pdserve.cluster.scaling.planning import Planning
from pdserve.cluster.scaling.port import PlanRefused, Poll, Replaced, RouterPort, Unanswered
from pdserve.cluster.scaling.report import reading_of, report_of
from pdserve.cluster.scaling.wanted import Mode, WantedSizes
from pdserve.core.worker import Role
from pdserve.planner.observe import ClusterReading
from pdserve.planner.resizing import Cancel, Drain, Flip, PoolMember, Start, Step, other, steps_of
from pdserve.rpc.v1 import inference_pb2, scaling_pb2

POLL_S: Final = 1.0  # workers report once a second


class ActuatedPool(Protocol):
    """The workers as the actuator uses them. Implemented by `pdserve.cluster.ray_pool.WorkerPool`."""

    @property
    def members(self) -> Sequence[Member]:
        """All workers, those that are gone and were not forgotten included."""

    def add(self, plan: WorkerPlan) -> None:
        """Ask for one more worker."""

    def cancel(self, worker_id: str) -> None:
        """End and forget a worker that serves nobody."""

    def forget(self, worker_id: str) -> None:
        """Forget a worker that is gone."""

    def move(self, worker_id: str, plan: WorkerPlan) -> None:
        """Let the next process of a worker start by another plan."""

    def forgive(self, worker_id: str, pid: int) -> None:
        """Do not count the death of a worker's process, since a request has ended it."""


class Actuator:
    """The actuator over a pool and a router. All times are seconds of a clock that the caller passes in."""

    def __init__(self, blueprint: Blueprint, pool: ActuatedPool, port: RouterPort, listener: Listener) -> None:
        """Prepare; the first `tick` polls. Raises `ConfigError` for a setting of the planner that is wrong."""
        config = blueprint.config
        self._blueprint, self._pool, self._port, self._listener = blueprint, pool, port, listener
        self._limits = limits_of(config)
        self.wanted = WantedSizes(
            configured_sizes(config),
            self._limits,
            automatic=config.autoscaling.enabled,
            unlimited=config.unlimited,
        )
        self._planning = Planning(config, blueprint.log_dir, self._policy_changed)
        self._marks = Marks()
        self._said: dict[str, WorkerChanged] = {}  # the last phase of each worker, as its pool told it
        self._holds = Holds()
        self._members: list[PoolMember] = []
        self._forgiven: set[tuple[str, int]] = set()
        self._next_poll_s = 0.0
        self._replaced = False

    def hear(self, event: Event) -> None:
        """Take an event of the pool, so that operators see why a worker is not there."""
        if isinstance(event, WorkerChanged):
            self._said[event.worker_id] = event

    def hopeless(self, role: Role, now_s: float) -> bool:
        """Tell whether a worker of the role died too often, and nobody starts another one now."""
        dead = [member for member in self._pool.members if member.state is MemberState.GONE and not member.drained]
        return self._holds.is_held(role, now_s) or (self._replaced and any(one.plan.role == role.value for one in dead))

    def tick(self, now_s: float) -> None:
        """Poll the router if it is time, and take the steps that the answer calls for."""
        if self._replaced or now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + POLL_S
        self._planning.follow(self.wanted, now_s)
        report = self._report(now_s)
        try:
            answer = self._port.poll(report)
        except Replaced as exc:
            self._replaced = True
            self._planning.close()
            self._listener(ActuatorReplaced(str(exc)))
            return
        if answer is not None:
            for _ in report.events:
                self.wanted.events.popleft()
            self._forgive(answer.state)
            self._heard(answer, now_s)
        self._tell_news()

    def close(self) -> None:
        """End the policies' processes and the connection to the router. Idempotent."""
        self._planning.close()
        self._port.close()

    def _forgive(self, state: inference_pb2.GetClusterStateResponse) -> None:
        """Tell the pool which processes a request has ended that had ended another one before."""
        ended = {(one.worker_id, one.pid) for one in state.poisoned_workers}
        for worker_id, pid in sorted(ended - self._forgiven):
            if any(member.worker_id == worker_id for member in self._pool.members):
                self._pool.forgive(worker_id, pid)
        self._forgiven = ended

    def _heard(self, answer: Poll, now_s: float) -> None:
        """Follow what has happened, take a new order, decide the sizes, and take the steps towards them."""
        if answer.new_router:
            self.wanted.new_router()
        reading = reading_of(answer.state, at_s=now_s)
        self._follow(reading, now_s)
        self._bury(now_s)
        if answer.order is not None and self.wanted.take(answer.order, now_s):
            self._holds.clear()  # the operator may have mended what kept workers from starting
            if not self.wanted.refused:
                self._marks.note_order(answer.order.roles, reading.workers)
        same_price = self._limits.prefill.price_per_hour == self._limits.decode.price_per_hour
        can_flip = same_price and not any(worker.hello.flip_obstacle for worker in reading.workers)
        limits = dataclasses.replace(self._limits, can_flip=can_flip)  # a flip never changes what a worker costs
        self._members = self._present(reading)
        sizes = self._planning.decide(reading, self._members, limits, self.wanted, now_s)
        if sizes is not None:
            self.wanted.plan(sizes, self._planning.reasons, now_s)
        self._tell_news()
        self._take(steps_of(self._members, self.wanted.sizes, limits), reading, now_s)
        self._members = self._present(reading)
        self._greet()

    def _greet(self) -> None:
        """Tell that workers have become ready, which only the router knows."""
        for member in self._members:
            said = self._said.get(member.worker_id)
            if member.ready and said is not None and said.phase in (WorkerPhase.LOADED, WorkerPhase.FLIPPING):
                self._say(member.worker_id, WorkerPhase.READY, f"in the {member.role.value} pool")

    def _say(self, worker_id: str, phase: WorkerPhase, detail: str = "") -> None:
        event = WorkerChanged(worker_id, phase, detail)
        self.hear(event)
        self._listener(event)

    def _present(self, reading: ClusterReading) -> list[PoolMember]:
        automatic = self.wanted.mode is Mode.AUTOMATIC
        return membership(self._pool.members, reading.workers, self._marks, automatic=automatic)

    def _follow(self, reading: ClusterReading, now_s: float) -> None:
        """Let the plans of workers follow the roles in which they serve."""
        for moved in reconcile(self._pool.members, reading.workers, self._marks):
            self._move(moved.worker_id, moved.role)
            if not moved.ours:
                why = f"{moved.worker_id} has become a {moved.role.value} worker"
                self.wanted.moved(moved.role, why, now_s, moved.settled)

    def _bury(self, now_s: float) -> None:
        """Forget workers that are gone. A worker that an operator drained makes its pool smaller, or is replaced. A worker that
        died too often is started again after a hold."""
        for member in self._pool.members:
            if member.state is not MemberState.GONE:
                continue
            role, name = Role(member.plan.role), member.worker_id
            said = self._said.pop(name, None)
            if not member.drained:
                self.wanted.note(f"{name} is dead: {said.detail if said else 'it died too often'}", now_s)
                self._holds.add(role, now_s)
            elif name not in self._marks.drains and role not in self._marks.settled(name):
                self.wanted.drained(role, f"{name} was drained", now_s)
            self._marks.drains.pop(name, None)
            self._pool.forget(name)

    def _take(self, steps: Sequence[Step], reading: ClusterReading, now_s: float) -> None:
        """Take the steps in their order. A step that no longer fits ends the round."""
        in_use = {str(worker.hello.worker_id) for worker in reading.workers}
        for step in steps:
            if isinstance(step, Start):
                self._start(step.role, in_use, now_s)
            elif isinstance(step, Cancel):
                self._pool.cancel(step.worker_id)
                self._said.pop(step.worker_id, None)
            elif not (self._drain(step) if isinstance(step, Drain) else self._flip(step, now_s)):
                return

    def _drain(self, step: Drain) -> bool:
        """Tell a worker to drain. False: the membership has changed. A lost answer counts as yes until the next poll."""
        name = step.worker_id
        self._marks.drains[name] = step.incarnation
        try:
            self._port.drain(name, step.incarnation)
        except PlanRefused:
            del self._marks.drains[name]
            return False
        except Unanswered:
            return False
        self._say(name, WorkerPhase.DRAINING)
        return True

    def _flip(self, step: Flip, now_s: float) -> bool:
        """Tell a worker to change its role; see `_drain`. Its next process starts in the new role, should it die meanwhile."""
        name, before = step.worker_id, other(step.role)
        self._marks.flips[name] = (step.incarnation, step.role)
        self._move(name, step.role)
        try:
            self._port.flip(name, step.incarnation, step.role)
        except PlanRefused as exc:
            del self._marks.flips[name]
            self._move(name, before)
            if not exc.stale:  # it would refuse again, so another worker is taken, or one leaves and one comes
                self._marks.obstacles[name] = (step.incarnation, str(exc))
                self.wanted.note(f"{name} cannot change its role: {exc}", now_s)
            return False
        except Unanswered:
            return False
        self._say(name, WorkerPhase.FLIPPING, f"to {step.role.value}")
        return True

    def _start(self, role: Role, in_use: set[str], now_s: float) -> None:
        """Ask for another worker, unless its role is held back."""
        if not self._holds.is_held(role, now_s):
            name = next_id(role.value, in_use | {member.worker_id for member in self._pool.members})
            self._pool.add(self._blueprint.plan(role.value, name))

    def _move(self, worker_id: str, role: Role) -> None:
        share = next(member.plan.share for member in self._pool.members if member.worker_id == worker_id)
        self._pool.move(worker_id, self._blueprint.plan(role.value, worker_id, share))

    def _policy_changed(self, event: PolicyChanged, now_s: float) -> None:
        self.wanted.record(event.text, now_s)
        self._listener(event)

    def _tell_news(self) -> None:
        for news in self.wanted.news:
            self._listener(PoolsResized(news.text, news.sizes.prefill, news.sizes.decode))
        self.wanted.news.clear()

    def _report(self, now_s: float) -> scaling_pb2.ScalingReport:
        report = report_of(self.wanted, self._members, self._said, self._holds.notes(now_s), now_s)
        if (plan := self._planning.to_wire(now_s)) is not None:
            report.plan.CopyFrom(plan)
        return report


def next_id(role: str, in_use: set[str]) -> str:
    """Return the id of a new worker: the lowest index that nobody has."""
    index = 0
    while f"{role}-{index}" in in_use:
        index += 1
    return f"{role}-{index}"


# The roles of which no worker is started for a while, because one died too often. Pure: time is passed in.

DAY_S: Final = 86_400.0
FIRST_S: Final = 60.0  # a worker that died too often has tried for about two minutes by itself
LONGEST_S: Final = 3600.0  # what kept workers from starting may be mended by others, and nobody may be there to say so


class Holds:
    """The holds of both roles. Each hold is twice as long as the last hold of the day, and none is longer than an hour."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._backoffs = {role: Backoff(sys.maxsize, DAY_S, FIRST_S, LONGEST_S) for role in Role}
        self._until_s: dict[Role, float] = {}

    def add(self, role: Role, now_s: float) -> None:
        """Hold back the role from now on. Workers that die while it is held have the same reason, and make it no longer."""
        if not self.is_held(role, now_s):
            self._until_s[role] = now_s + (self._backoffs[role].next_delay_s(now_s) or LONGEST_S)

    def is_held(self, role: Role, now_s: float) -> bool:
        """Tell whether no worker of the role may be started now."""
        return now_s < self._until_s.get(role, now_s)

    def notes(self, now_s: float) -> list[str]:
        """Return a sentence for each role that is held back."""
        return [
            f"No {role.value} worker is started for {until_s - now_s:.0f} s, because one died too often; `pdserve scale` "
            "starts it at once."
            for role, until_s in self._until_s.items()
            if until_s > now_s
        ]
