"""The way from any layout of a live cluster to another one, one step at a time. Pure.

Every worker has a home: the role and the limits that it had when the first layout was wanted. A layout takes its prefill
workers from one fixed order of all workers, those at home in the prefill pool first. So the prefill pools of two layouts
contain each other, no two workers ever swap their roles, and the way back to the homes never needs a worker twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.core.worker import Role, WorkerHello, check_budget
from pdserve_bench.layout import Layout


class CannotShape(PdserveError):
    """A cluster cannot be brought to a layout, or was disturbed on the way. The message says what to do."""


@dataclass(frozen=True, slots=True)
class WorkerNow:
    """One linked worker, as its router sees it."""

    hello: WorkerHello
    max_num_batched_tokens: int
    """The limit that its last heartbeat told. So is the next one."""
    max_num_seqs: int
    ready: bool
    draining: bool
    work: int
    """The requests, sequences and leases that it has, in any role."""

    @property
    def name(self) -> str:
        """The id of the worker."""
        return str(self.hello.worker_id)


@dataclass(frozen=True, slots=True)
class ClusterNow:
    """A cluster as of one look."""

    router: int
    """The incarnation of the router."""
    requests: int
    """The requests that wait in the router or run."""
    workers: tuple[WorkerNow, ...]
    actuator: str = ""
    """The name of the process that changes the sizes of the pools. Empty: none polls the router."""
    automatic: bool = False
    """The planner decides the sizes."""
    order: int = 0
    """The number of the last order that the actuator has taken."""
    refused: str = ""
    """The reason why it did not follow that order. Empty: it did."""


@dataclass(frozen=True, slots=True)
class WantedShape:
    """The role and the limits that one worker should have."""

    role: Role
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Home:
    """The layout of a cluster before a search. The file of a search keeps it until it is back."""

    workers: dict[str, WantedShape]
    """The role and the limits of every worker, by its id."""
    pids: dict[str, int]
    """The processes of the workers. Others need not come back to anything."""
    automatic: bool
    """The planner decided the sizes."""


@dataclass(frozen=True, slots=True)
class FlipWorker:
    """Let a worker change its role."""

    worker_id: str
    incarnation: int
    role: Role


@dataclass(frozen=True, slots=True)
class ReshapeLimits:
    """New limits of some workers. 0: the limit stays as it is."""

    worker_ids: tuple[str, ...]
    max_num_batched_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Give workers new limits. Their heartbeats tell them later."""

    parts: tuple[ReshapeLimits, ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing can be done now. `why` says what is waited for."""

    why: str


Step = FlipWorker | SetLimits | Wait


def homes_of(cluster: ClusterNow) -> dict[str, WantedShape]:
    """Return the present role and limits of every worker, by its id."""
    return {
        one.name: WantedShape(one.hello.role, one.max_num_batched_tokens, one.max_num_seqs)
        for one in sorted(cluster.workers, key=lambda one: one.name)
    }


def home_of(cluster: ClusterNow) -> Home:
    """Return the present layout as one that a search must bring back."""
    return Home(homes_of(cluster), pids_of(cluster), cluster.automatic)


def pids_of(cluster: ClusterNow) -> dict[str, int]:
    """Return the process of every worker, by the worker's id."""
    return {one.name: int(one.hello.pid) for one in cluster.workers}


def targets_of(layout: Layout, homes: Mapping[str, WantedShape], hellos: Mapping[str, WorkerHello]) -> dict[str, WantedShape]:
    """Return what every worker should be in a layout, by its id. Raises `CannotShape` for a layout that cannot be reached.

    hellos: of all workers of `homes`. Workers that compute prompts get the layout's `chunk_tokens`, and decode workers its
    `max_num_seqs` and, where others compute prompts, the smallest step that a decode worker has in `homes`. Prefill workers run
    as many sequences as they were started with.
    """
    if layout.workers != len(homes) or layout.decode < 1 or layout.prefill < 0:
        raise CannotShape(
            f"layout {layout.name} has {layout.workers} workers and the cluster has {len(homes)}: "
            "give splits of as many workers, at least one of them for decode"
        )
    order = sorted(homes, key=lambda name: (_rank(homes[name], hellos[name]), name))
    steps = [home.max_num_batched_tokens for home in homes.values() if home.role is Role.DECODE]
    if not steps:
        raise CannotShape("the cluster has no decode worker: start one, or flip one (`pdserve flip`)")
    step_tokens = min(steps)
    targets = {name: _target(layout, number < layout.prefill, hellos[name], step_tokens) for number, name in enumerate(order)}
    for name, target in targets.items():
        obstacle = hellos[name].flip_obstacle
        if obstacle and target.role is not homes[name].role:
            raise CannotShape(
                f"layout {layout.name} needs worker {name!r} as a {target.role.value} worker, but it cannot change its role: "
                f"{obstacle}"
            )
        same_seqs = target.max_num_seqs == hellos[name].max_num_seqs
        max_num_seqs = 0 if same_seqs else target.max_num_seqs  # 0: that of the start, for a worker that cannot change it
        if not target.max_num_batched_tokens and not max_num_seqs:
            continue
        try:
            check_budget(hellos[name], target.max_num_batched_tokens, max_num_seqs)
        except InvalidRequest as exc:
            raise CannotShape(f"layout {layout.name}: {exc.message}: choose another value, or start the workers so") from exc
    return targets


def next_step(cluster: ClusterNow, targets: Mapping[str, WantedShape], *, idle: bool = True) -> Step | None:
    """Return what to do now so that every worker becomes its target. None: the cluster is there and has settled.

    idle: it has settled only when nothing runs any more.
    Workers become decode workers before others become prefill workers, so a decode worker is always left.
    """
    workers = {one.name: one for one in cluster.workers}
    if missing := [name for name in targets if name not in workers]:
        return Wait(f"{', '.join(missing)} to be linked to the router")
    if leaving := [name for name in targets if workers[name].draining]:
        return Wait(f"{', '.join(leaving)}, which drains or changes its role")
    for role in (Role.DECODE, Role.PREFILL):
        for name, target in targets.items():
            if target.role is role is not workers[name].hello.role:
                if unready := _unready(cluster.workers):
                    return Wait(unready)
                return FlipWorker(name, int(workers[name].hello.incarnation), role)
    if limits := _limits(workers, targets):
        return limits
    if unready := _unready(cluster.workers):
        return Wait(unready)
    if idle and (cluster.requests or any(one.work for one in cluster.workers)):
        return Wait("requests, sequences or leases that have not ended")
    return None


def flips_between(cluster: ClusterNow, targets: Mapping[str, WantedShape]) -> int | None:
    """Return how many flips lead to the targets if nobody else changes a role. None: some worker is not linked now."""
    if targets.keys() - {one.name for one in cluster.workers}:
        return None
    return sum(one.name in targets and targets[one.name].role is not one.hello.role for one in cluster.workers)


def _target(layout: Layout, prefills: bool, hello: WorkerHello, decode_step_tokens: int) -> WantedShape:
    chunked = prefills or not layout.disaggregated
    chunk = layout.chunk_tokens if chunked else min(decode_step_tokens, hello.max_num_batched_tokens)
    return WantedShape(
        Role.PREFILL if prefills else Role.DECODE,
        chunk if hello.max_num_batched_tokens else 0,  # a worker that does not say how large its steps are keeps them
        hello.max_num_seqs if prefills else layout.max_num_seqs,
    )


def _rank(home: WantedShape, hello: WorkerHello) -> int:
    """Return the place of a worker in the order by which prefill workers are taken. One that cannot flip stays where it is."""
    if home.role is Role.PREFILL:
        return 0 if hello.flip_obstacle else 1
    return 3 if hello.flip_obstacle else 2


def _limits(workers: Mapping[str, WorkerNow], targets: Mapping[str, WantedShape]) -> SetLimits | None:
    """Return the limits to set, for each group of workers that need the same limits. None: all workers have their limits
    already."""
    wrong: dict[tuple[int, int], list[str]] = {}
    for name, target in targets.items():
        now = workers[name]
        tokens = 0 if now.max_num_batched_tokens == target.max_num_batched_tokens else target.max_num_batched_tokens
        seqs = 0 if now.max_num_seqs == target.max_num_seqs else target.max_num_seqs
        if tokens or seqs:
            wrong.setdefault((tokens, seqs), []).append(name)
    return SetLimits(tuple(ReshapeLimits(tuple(names), *limits) for limits, names in wrong.items())) if wrong else None


def _unready(workers: Sequence[WorkerNow]) -> str:
    names = [one.name for one in workers if not one.ready]
    return f"{', '.join(names)} to be ready" if names else ""
