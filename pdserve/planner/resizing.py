"""The steps that bring both pools to their wanted sizes: workers are started, cancelled, drained, or change their role. Pure.

The steps hold only for the membership from which they were computed. Each step that touches a serving worker names its
incarnation, so that the step never meets a later process with the same name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from pdserve.core.worker import Role
from pdserve.planner.limits import Limits, PoolSizes


class Phase(Enum):
    """The phase of one worker, as far as the sizes of the pools concern it."""

    WAITING = "waiting"  # it was asked for and has no place yet, so cancelling it costs nothing
    LOADING = "loading"  # its process loads the model; it serves nobody, so it may be cancelled as well
    SERVING = "serving"  # it is linked to the router
    SETTLING = "settling"  # it counts for its pool and is not touched now: it changes its role, or comes back
    LEAVING = "leaving"  # it drains. It counts for no pool, but still costs what a worker costs


@dataclass(frozen=True, slots=True)
class PoolMember:
    """One worker that exists or was asked for. A worker that changes its role counts for the new one."""

    worker_id: str
    role: Role
    phase: Phase
    incarnation: int = 0
    """The incarnation that is linked to the router. 0: none is."""
    ready: bool = False
    """The worker takes requests."""
    work: float = 0.0
    """The work that it has, in any unit that all workers share."""
    since_s: float = 0.0
    """The time at which it was asked for. The youngest worker has the largest."""
    obstacle: str = ""
    """The reason why it cannot change its role. Empty: it can."""


@dataclass(frozen=True, slots=True)
class Start:
    """Ask for another worker of the role."""

    role: Role


@dataclass(frozen=True, slots=True)
class Cancel:
    """End a worker that serves nobody yet."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Drain a worker, which then leaves."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Flip:
    """Let a worker change its role. Its process, weights and KV pool stay."""

    worker_id: str
    incarnation: int
    role: Role


Step = Start | Cancel | Drain | Flip


def steps_of(members: Sequence[PoolMember], sizes: PoolSizes, limits: Limits) -> list[Step]:
    """Return the steps that can be taken now towards the sizes. More may follow from the membership that they lead to.

    Workers that serve nobody go first. A worker of the pool that shrinks changes its role if the other pool grows. No step
    exceeds the limits of both pools together, so a start may have to wait until another worker has left.
    """
    steps: list[Step] = []
    spare, missing = dict.fromkeys(Role, 0), dict.fromkeys(Role, 0)
    for role, wanted in ((Role.PREFILL, sizes.prefill), (Role.DECODE, sizes.decode)):
        over = count_of(members, role) - wanted
        missing[role] = max(0, -over)
        # Those without a place go first, and the youngest of each phase first.
        pending = [member for member in members if member.role is role and member.phase in (Phase.WAITING, Phase.LOADING)]
        pending.sort(key=lambda m: (m.phase is Phase.LOADING, -m.since_s, m.worker_id))
        cancelled = pending[: max(0, over)]
        steps += [Cancel(member.worker_id) for member in cancelled]
        spare[role] = max(0, over) - len(cancelled)
    for role, wanted in ((Role.PREFILL, sizes.prefill), (Role.DECODE, sizes.decode)):
        free = _dispensable(members, role, wanted)[: spare[role]]
        movable = [member for member in free if limits.can_flip and not member.obstacle]
        flips = movable[: missing[other(role)]]
        steps += [Flip(member.worker_id, member.incarnation, other(role)) for member in flips]
        missing[other(role)] -= len(flips)
        steps += [Drain(member.worker_id, member.incarnation) for member in free if member not in flips]
    return steps + _starts(members, missing, limits)


def count_of(members: Iterable[PoolMember], role: Role) -> int:
    """Return how many workers count for the pool of the role: those that serve, come, or settle, but not those that leave."""
    return sum(member.role is role and member.phase is not Phase.LEAVING for member in members)


def _dispensable(members: Sequence[PoolMember], role: Role, wanted: int) -> list[PoolMember]:
    """Return the serving workers without which the pool still has as many workers that take requests as it should have.

    The worker that is missed least is first: a worker that takes no requests, then the worker with the least work, then the
    youngest. A worker that settles may fail to come, so none that takes requests leaves for its sake.
    """
    serving = [member for member in members if member.role is role and member.phase is Phase.SERVING]
    serving.sort(key=lambda m: m.worker_id, reverse=True)
    serving.sort(key=lambda m: (m.ready, m.work, -m.since_s))
    unready = sum(not member.ready for member in serving)
    return serving[: unready + max(0, len(serving) - unready - wanted)]


def _starts(members: Sequence[PoolMember], missing: dict[Role, int], limits: Limits) -> list[Step]:
    """Return the starts that the limits leave room for. The pools take turns, decode first: every request ends there."""
    counts = {role: sum(member.role is role for member in members) for role in Role}
    steps: list[Step] = []
    while any(missing.values()):
        began = len(steps)
        for role in (Role.DECODE, Role.PREFILL):
            after = counts | {role: counts[role] + 1}
            if missing[role] and not limits.exceeded(after[Role.PREFILL], after[Role.DECODE]):
                counts = after
                missing[role] -= 1
                steps.append(Start(role))
        if len(steps) == began:
            break
    return steps


def other(role: Role) -> Role:
    """Return the role of the other pool."""
    return Role.DECODE if role is Role.PREFILL else Role.PREFILL
