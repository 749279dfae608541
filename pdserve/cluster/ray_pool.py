"""The workers of both pools as Ray actors: started together, watched without polling them, stopped.

One call per worker, `watch`, stays open for as long as the worker's process lives. Ray fails it when the process
dies, and its error tells a death that Ray heals from one that is for good. When it returns, the worker has drained:
its process is ended for good, its node's place is free.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from pdserve.cluster.actor import WorkerActor, WorkerReport
from pdserve.cluster.errors import ClusterError, Interrupted
from pdserve.cluster.events import Listener, WorkerChanged, WorkerPhase
from pdserve.cluster.plan import WorkerPlan
from pdserve.core.errors import ConfigError

START_TIMEOUT_S = 300.0  # a first start may convert or download a model
LOOK_S = 0.2  # how soon a wish to stop is noticed while waiting
STOP_TIMEOUT_S = 3.0


@dataclass(slots=True)
class _Member:
    plan: WorkerPlan
    actor: Any
    pending: Any  # reference of its open call: `report` while it starts, then `watch`
    report: WorkerReport | None = None
    restarting: bool = False  # Ray fails each call to it meanwhile: one death is told once
    gone: bool = False  # for good


class WorkerPool:
    """Owned and called by one thread, the one that joined Ray."""

    def __init__(self, plans: Sequence[WorkerPlan], listener: Listener) -> None:
        self._plans = plans
        self._listener = listener
        self._members: list[_Member] = []

    def launch(self) -> None:
        """Ask Ray for every worker; returns at once."""
        for plan in self._plans:
            actor: Any = ray.remote(WorkerActor).options(**_options(plan)).remote(plan, time.time())
            self._members.append(_Member(plan, actor, actor.report.remote()))
            self._tell(plan, WorkerPhase.STARTING)

    def wait_loaded(self, stop: threading.Event, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until every worker has loaded its model. Raises `Interrupted`, `ConfigError` or `ClusterError`."""
        deadline = time.monotonic() + timeout_s
        while waiting := [member for member in self._members if member.report is None]:
            if stop.is_set():
                raise Interrupted
            if time.monotonic() > deadline:
                names = ", ".join(member.plan.worker_id for member in waiting)
                raise ClusterError(f"{names}: not started after {timeout_s:.0f} s; {_lacking(waiting)}")
            for member in self._answered(waiting, LOOK_S):
                try:
                    self._loaded(member, ray.get(member.pending))
                except RayError as exc:
                    raise _failed_start(member.plan, exc) from exc

    def check(self) -> None:
        """Look once, without waiting, whether a worker died, came back or left; tells the listener."""
        for member in self._answered([member for member in self._members if not member.gone], 0.0):
            try:
                answer = ray.get(member.pending)
            except RayError as exc:
                self._lost(member, exc)
                continue
            if isinstance(answer, WorkerReport):
                self._loaded(member, answer)
            elif answer:
                self._drained(member)

    @property
    def reports(self) -> tuple[WorkerReport, ...]:
        """Of the workers that run, in the order of their plans."""
        return tuple(member.report for member in self._members if member.report is not None)

    @property
    def all_gone(self) -> tuple[str, ...]:
        """Roles of which no worker will come back."""
        roles = dict.fromkeys(plan.role for plan in self._plans)
        return tuple(role for role in roles if all(m.gone for m in self._members if m.plan.role == role))

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop all at once, within the bound, then end their processes for good. Idempotent."""
        members, self._members = self._members, []
        calls = [member.actor.stop.remote(timeout_s) for member in members if member.report is not None]
        if calls:
            ray.wait(calls, num_returns=len(calls), timeout=timeout_s + 1.0)
        for member in members:
            ray.kill(member.actor, no_restart=True)

    def _answered(self, members: Iterable[_Member], timeout_s: float) -> list[_Member]:
        by_reference = {member.pending: member for member in members}
        if not by_reference:
            return []
        done, _ = ray.wait(list(by_reference), num_returns=1, timeout=timeout_s)
        return [by_reference[reference] for reference in done]

    def _loaded(self, member: _Member, report: WorkerReport) -> None:
        member.report = report
        member.restarting = False
        member.pending = member.actor.watch.remote()
        self._tell(member.plan, WorkerPhase.LOADED)

    def _lost(self, member: _Member, exc: RayError) -> None:
        member.report = None
        if isinstance(exc, ActorUnavailableError):
            member.pending = member.actor.report.remote()  # answered once Ray has started it again; may fail until then
            if not member.restarting:
                member.restarting = True
                self._tell(member.plan, WorkerPhase.RESTARTING)
        else:
            member.gone = True
            self._tell(member.plan, WorkerPhase.DEAD, f"see {member.plan.log_dir}/{member.plan.worker_id}.log")

    def _drained(self, member: _Member) -> None:
        """Its process is still there, empty: Ray would start another if it ended by itself."""
        member.report = None
        member.gone = True
        ray.kill(member.actor, no_restart=True)
        self._tell(member.plan, WorkerPhase.DRAINED)

    def _tell(self, plan: WorkerPlan, phase: WorkerPhase, detail: str = "") -> None:
        self._listener(WorkerChanged(plan.worker_id, phase, detail))


def _options(plan: WorkerPlan) -> dict[str, Any]:
    return {
        "num_cpus": plan.num_cpus,
        "num_gpus": plan.num_gpus,
        "resources": plan.resources,
        "max_restarts": plan.max_restarts,
        "max_task_retries": 0,  # a `watch` that were retried would hide the death it waits for
        "max_concurrency": WorkerActor.CONCURRENCY,
        "runtime_env": {"env_vars": plan.env},
    }


def _lacking(waiting: Sequence[_Member]) -> str:
    needs = sorted({f"{name}: {amount:g}" for m in waiting for name, amount in m.plan.resources.items()})
    return f"does a node of the Ray cluster offer {{{', '.join(needs)}}}?"


def _failed_start(plan: WorkerPlan, exc: RayError) -> ConfigError | ClusterError:
    """One line out of Ray's report, whose last line is the worker's own error when its start raised."""
    if isinstance(exc, (RayActorError, RayTaskError)):
        lines = [line for line in str(exc).splitlines() if line.strip()]
        match = re.match(r"\s*(?:[\w.]+\.)?(\w+): (.*)", lines[-1]) if lines else None
        if match and match[1] == "ConfigError":
            return ConfigError(match[2])
        if match and getattr(exc, "actor_init_failed", False):
            return ClusterError(f"{plan.worker_id} cannot start: {match[1]}: {match[2]}; see {plan.log_dir}")
    return ClusterError(f"{plan.worker_id} died while starting; see {plan.log_dir}/{plan.worker_id}.log")
