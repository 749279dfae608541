"""The workers of both pools as Ray actors. They are started together, watched without polling, restarted and stopped.

One call to each worker stays open: `place` until its process runs, `load` while it starts, then `watch` for as long as it
lives. Ray fails the call when the process dies. When `watch` returns True, the worker has drained: its process is ended
for good, and its place on the node becomes free.

Ray itself restarts no worker, because it would restart without a delay, and would count deaths over the worker's whole
life. Here each worker has a number of restarts an hour, with delays that double
(docs/design/0017-joining-a-ray-cluster.md).
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import ray
from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pdserve.cluster.actor import WorkerActor
from pdserve.cluster.errors import ClusterError, StartFailed, WorkerDied
from pdserve.cluster.events import Listener, WorkerChanged, WorkerLoads, WorkerPhase
from pdserve.cluster.keeping.order import NodePlace, WorkerReport
from pdserve.cluster.member import Member, MemberState
from pdserve.cluster.nodes import NodeView, spread, waits_for, without_node
from pdserve.cluster.plan import WorkerPlan
from pdserve.core.errors import ConfigError

PLACE_TIMEOUT_S: Final = 900.0  # a machine with GPUs takes minutes to be rented and to start
EXPLAIN_S: Final = 1.0  # the pause between looks at the nodes while a worker has no place
PROGRESS_S: Final = 1.0  # the pause between questions to a worker that loads
STOP_TIMEOUT_S: Final = 3.0
END_TIMEOUT_S: Final = 3.0  # a killed process is gone within milliseconds, unless it holds a lot of memory


class WorkerPool:
    """All workers of one cluster. Only the thread that joined Ray calls it.

    look: returns a view of Ray's nodes. None stands for a private Ray, where every worker fits.
    """

    def __init__(
        self, plans: Sequence[WorkerPlan], listener: Listener, *, look: Callable[[], NodeView | None] | None = None
    ) -> None:
        self._listener = listener
        self._members = [Member(plan) for plan in plans]
        self._look = look
        self._explained_s = 0.0

    def launch(self) -> None:
        """Ask Ray for every worker, without waiting for it."""
        for member, node_id in zip(self._members, self._nodes_of(self._members), strict=True):
            self._ask(member, node_id)

    def check(self, wait_s: float = 0.0) -> None:
        """Look once whether a worker started, died, came back or left, and tell the listener.

        The look waits for news for at most `wait_s`.
        """
        self._look_once(wait_s)
        for member in self._members:
            if late := _late(member):
                self._fails(member, ClusterError(late))

    @property
    def members(self) -> tuple[Member, ...]:
        """All workers, those that are gone and were not forgotten included. The caller changes nothing in them."""
        return tuple(self._members)

    def add(self, plan: WorkerPlan) -> None:
        """Ask Ray for one more worker, without waiting for it.

        Its share of a node's cores is that of an even spread. Workers that run keep the threads that they have.
        """
        assert all(member.worker_id != plan.worker_id for member in self._members), plan.worker_id
        view = self._look() if self._look is not None else None
        nodes = max(1, len(view.nodes)) if view is not None else 1
        ranks = sum(member.plan.ranks for member in self._members) + plan.ranks
        member = Member(dataclasses.replace(plan, share=max(plan.ranks, -(-ranks // nodes))))
        self._members.append(member)
        self._ask(member, *self._nodes_of([member]))

    def cancel(self, worker_id: str) -> None:
        """End a worker that serves nobody: it has no place yet, loads, or waits for a restart. It is then forgotten."""
        member = self._named(worker_id)
        _end([member])
        self._members.remove(member)
        self._tell(member, WorkerPhase.CANCELLED)

    def forget(self, worker_id: str) -> None:
        """Forget a worker that is gone, so that its id is free."""
        member = self._named(worker_id)
        assert member.state is MemberState.GONE, member.state
        self._members.remove(member)

    def move(self, worker_id: str, plan: WorkerPlan) -> None:
        """Let the next process of a worker start by another plan, since its present one changes its role or has done so."""
        self._named(worker_id).replan(plan)

    def forgive(self, worker_id: str, pid: int) -> None:
        """Do not count the death of a worker's process, since a request has ended it."""
        self._named(worker_id).forgive(pid)

    def _named(self, worker_id: str) -> Member:
        return next(member for member in self._members if member.worker_id == worker_id)

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop all workers at the same time, within `timeout_s`, then end their processes for good. Idempotent."""
        members, self._members = self._members, []
        calls = [member.actor.stop.remote(timeout_s) for member in members if member.state is MemberState.RUNNING]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=timeout_s + 1.0)
        _end(members)

    def _look_once(self, timeout_s: float) -> None:
        now = time.monotonic()
        for member in self._members:
            if member.state is MemberState.BACKING_OFF and now >= member.again_s:
                self._ask(member, *self._nodes_of([member]))
        for member in self._answered([member for member in self._members if member.pending is not None], timeout_s):
            self._heard(member)
        for member in [member for member in self._members if member.state is MemberState.LOADING]:
            self._follow(member, now)
        if now - self._explained_s >= EXPLAIN_S:
            self._explained_s = now
            self._explain([member for member in self._members if member.state is MemberState.PLACING])

    def _nodes_of(self, asked: Sequence[Member]) -> list[str | None]:
        """Return a node id for each worker, or None to let Ray choose.

        A node is chosen here for a worker whose process may run there still, because only its keeper died, and for a worker
        that asks for no resources, which Ray would put anywhere.
        """
        view = self._look() if self._look is not None else None
        if view is None:
            return [None] * len(asked)
        there = [member.node_id for member in self._members if member.node_id is not None]
        chosen = spread([member.plan.needs for member in asked], view.nodes, there)
        by_host = {node.host: node.node_id for node in view.nodes}
        runs = [by_host.get(member.host) if member.plan.lasting and member.host else None for member in asked]
        free = [None if member.plan.needs.amounts else node for member, node in zip(asked, chosen, strict=True)]
        return [there or node for there, node in zip(runs, free, strict=True)]

    def _ask(self, member: Member, node_id: str | None) -> None:
        actor = ray.remote(WorkerActor).options(**_options(member.plan, node_id, spread=self._look is not None))
        member.asked(actor.remote(member.plan, time.time()), node_id, time.monotonic())
        self._tell(member, WorkerPhase.STARTING)

    def _answered(self, members: Iterable[Member], timeout_s: float) -> list[Member]:
        by_reference = {member.pending: member for member in members}
        if not by_reference:
            time.sleep(timeout_s)
            return []
        done, _ = ray.wait(list(by_reference), num_returns=1 if timeout_s else len(by_reference), timeout=timeout_s)
        return [by_reference[reference] for reference in done]

    def _heard(self, member: Member) -> None:
        try:
            answer = ray.get(member.pending)
        except ActorUnavailableError:
            member.ask_again()  # only the connection was lost; if the process is lost too, Ray fails the next call
        except RayError as exc:
            self._lost(member, exc)
        else:
            self._said(member, answer)

    def _follow(self, member: Member, now: float) -> None:
        """Ask a worker that loads how far it is, and tell the listener what it answered."""
        if member.progress is None:
            if now - member.asked_progress_s >= PROGRESS_S:
                member.ask_progress(now)
            return
        if not ray.wait([member.progress], timeout=0)[0]:
            return
        answered, member.progress = member.progress, None
        try:
            state = ray.get(answered)
        except RayError:  # the open call fails as well, and `_heard` deals with that
            return
        if state is not None:
            self._listener(WorkerLoads(member.worker_id, state))

    def _said(self, member: Member, answer: NodePlace | WorkerReport | bool) -> None:
        if isinstance(answer, NodePlace):
            member.placed(answer, time.monotonic())
            self._tell(member, WorkerPhase.LOADING, f"on {answer.host}" if member.plan.node_address else "")
        elif isinstance(answer, WorkerReport):
            member.loaded(answer, time.monotonic())
            self._tell(member, WorkerPhase.LOADED, "it ran already" if answer.adopted else "")
        elif answer:  # the worker has drained; its empty process is still there
            _end([member])
            member.gone(time.monotonic())
            self._tell(member, WorkerPhase.DRAINED)

    def _lost(self, member: Member, exc: RayError) -> None:
        """Plan the restart of a worker whose process died, or give it up.

        The first start that fails is kept as the member's `failure`, which may end the start of the whole cluster. A node that
        left is nobody's failure.
        """
        if isinstance(exc, RayTaskError):  # the keeper lives and says that the process has died
            member.host = ""
        if isinstance(exc, ActorUnschedulableError) or (isinstance(exc, RayActorError) and exc.preempted):
            self._again(member, _see_log(member), counts=False)
        elif member.first_start:
            self._fails(member, _failed_start(member.plan, exc))
        else:
            self._again(member, _see_log(member), counts=True)

    def _fails(self, member: Member, failure: ConfigError | ClusterError) -> None:
        if member.first_start:
            member.failure = failure
        self._again(member, failure.message, counts=True)

    def _again(self, member: Member, detail: str, *, counts: bool) -> None:
        """End the process if it still runs, and plan the next one, or give the worker up for now. `counts`: a restart is used
        up."""
        _end([member])
        delay_s = member.died(time.monotonic(), counts=counts)
        if delay_s is None:
            self._tell(member, WorkerPhase.DEAD, f"given up for now, {member.restarts_used}; {detail}")
        else:
            why = member.restarts_used if counts else "its node left"
            self._tell(member, WorkerPhase.RESTARTING, f"in {delay_s:g} s, {why}; {detail}")

    def _explain(self, placing: Sequence[Member]) -> None:
        """Tell the listener why workers have no place, whenever a reason changes."""
        view = self._look() if self._look is not None and placing else None
        if view is None:
            return
        placed = [(m.node_id, m.plan.needs) for m in self._members if m.node_id and m.state is not MemberState.PLACING]
        waits = without_node([member.plan.needs for member in placing], view)
        for member, wait in zip(placing, waits, strict=True):
            alike = sum(each for other, each in zip(placing, waits, strict=True) if other.plan.role == member.plan.role)
            needs = member.plan.needs
            why = waits_for(member.plan.role, needs, view, placed=placed, waiting=alike) if wait else None
            if member.waits_for_now(why):
                self._tell(member, WorkerPhase.WAITING, str(why))

    def _tell(self, member: Member, phase: WorkerPhase, detail: str = "") -> None:
        self._listener(WorkerChanged(member.worker_id, phase, detail))


def _options(plan: WorkerPlan, node_id: str | None, *, spread: bool) -> dict[str, Any]:
    # The node on which it may run may have no room any more. Ray puts an actor that asks for nothing, which always has room, on
    # any node unless the affinity is hard.
    soft = bool(plan.needs.amounts)
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=soft) if node_id else "SPREAD"
    return {
        "num_cpus": plan.num_cpus,
        "num_gpus": plan.num_gpus,
        "resources": plan.resources,
        **({"label_selector": plan.labels} if plan.labels else {}),
        **({"scheduling_strategy": strategy} if spread else {}),
        "max_restarts": 0,
        "max_task_retries": 0,  # a retried `watch` would hide the death that it waits for
        "max_concurrency": WorkerActor.CONCURRENCY,
        **({"runtime_env": {"env_vars": plan.env}} if plan.env else {}),
    }


def _end(members: Sequence[Member]) -> None:
    """End the processes that still run, and their keepers. The process of a worker that could not start may run."""
    started = [member.actor for member in members if member.actor is not None and member.state is not MemberState.PLACING]
    if calls := [actor.end.remote() for actor in started]:  # a keeper that died ends nothing; the next one finds the process
        ray.wait(calls, num_returns=len(calls), timeout=END_TIMEOUT_S)
    for member in members:
        if member.actor is not None:
            ray.kill(member.actor, no_restart=True)


def _late(member: Member) -> str:
    """Return the failure of a worker that waits too long for a place, or loads for too long. Empty: it does not."""
    if member.state not in (MemberState.PLACING, MemberState.LOADING) or (
        member.state is MemberState.PLACING and not member.first_start
    ):
        return ""
    limit_s = PLACE_TIMEOUT_S if member.state is MemberState.PLACING else member.plan.start_timeout_s
    if time.monotonic() - member.since_s <= limit_s:
        return ""
    setting = "" if member.state is MemberState.PLACING else " (start_timeout_s)"
    return f"{member.worker_id}: not started after {limit_s:.0f} s{setting}; {member.waits_for or f'see {member.plan.log_dir}'}"


def _see_log(member: Member) -> str:
    return f"see {member.plan.log_dir}/{member.worker_id}.log"


def _failed_start(plan: WorkerPlan, exc: RayError) -> ConfigError | ClusterError:
    """Make one line out of Ray's report. Its last line is the worker's own error if the worker's start raised one."""
    if isinstance(exc, (RayActorError, RayTaskError)):
        lines = [line for line in str(exc).splitlines() if line.strip()]
        match = re.match(r"\s*(?:[\w.]+\.)?(\w+): (.*)", lines[-1]) if lines else None
        if match and match[1] == ConfigError.__name__:
            return ConfigError(match[2])
        if match and match[1] == StartFailed.__name__:
            return ClusterError(f"{plan.worker_id} cannot start: {match[2]}; see {plan.log_dir}")
        if match and match[1] == WorkerDied.__name__:
            match = None
        if match and (isinstance(exc, RayTaskError) or getattr(exc, "actor_init_failed", False)):
            return ClusterError(f"{plan.worker_id} cannot start: {match[1]}: {match[2]}; see {plan.log_dir}")
    return ClusterError(f"{plan.worker_id} died while starting; see {plan.log_dir}/{plan.worker_id}.log")
