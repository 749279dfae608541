"""The planner: from what was observed to the sizes of both pools. Pure: it keeps what it learns in the state that it returns.

A planner is called once an interval. `Plan.state` goes into the next call; `PlannerState()` begins anew. The way of a plan:

    observations -> demand -> need -> correction -> hysteresis -> limits -> what may be started now

Each part is a file of this room; the last two are in budget.py. docs/autoscaling.md explains it to operators,
docs/design/0034-planner.md says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from pdserve.core.worker import Role
from pdserve.planner.budget import startable, within_limits
from pdserve.planner.correction import NO_CORRECTIONS, Corrections, PoolCorrection, PoolSeen, corrected
from pdserve.planner.demand import NO_TRAFFIC, Traffic, output_demand, prompt_demand
from pdserve.planner.hysteresis import PoolMemory, begun, decided, free, given, held
from pdserve.planner.limits import Limits, PoolLimits, PoolSizes, Targets
from pdserve.planner.need import NO_WORKERS, Need, Workers, decode_need, prefill_need
from pdserve.planner.observations import DemandObserved, Observations, PoolObserved
from pdserve.planner.policy import PolicySize
from pdserve.planner.reasons import (
    flip_sentence,
    held_sentence,
    missed_sentences,
    need_sentence,
    policy_sentence,
    room_sentence,
    size_sentences,
    waiting_sentence,
)
from pdserve.planner.settings import PlannerSettings
from pdserve.planner.steps import TRUST_BOUND

__all__ = ["Plan", "PlannerSettings", "PlannerState", "PoolNeed", "plan", "planned_once"]

_GAP: Final = 3.0
"""A planner that saw nothing for so many intervals knows nothing about the time between: the sizes count as needed then."""


@dataclass(frozen=True, slots=True)
class PoolNeed:
    """The way from the demand to the size of one pool. None: not known."""

    role: Role
    demand_tokens_per_s: float | None = None
    """Prompt tokens without cached KV, or output tokens, that the pool should compute in a second."""
    worker_tokens_per_s: float | None = None
    """The rate of one worker at which requests still meet their targets."""
    correction: float = 1.0
    """The corrected need over the one that was computed."""
    raw_workers: float | None = None
    """The workers that the demand needs, with the correction, before rounding and limits."""
    wanted: int = 0
    """The size after hysteresis and cool-down, before the limits."""
    size: int = 0
    """The size in the plan."""
    limits: tuple[str, ...] = ()
    """The limits that changed the size, such as "decode.max_workers" or "max_gpus". "leaving": workers that drain use it."""


@dataclass(frozen=True, slots=True)
class PlannerState:
    """The memory of a planner from one interval to the next. Its size is bounded."""

    began_s: float | None = None
    """The end of the first interval of which everything was known."""
    now_s: float | None = None
    """The end of the last interval of which everything was known. None: there was none."""
    sizes: PoolSizes | None = None
    """The sizes of the last plan."""
    traffic: Traffic = NO_TRAFFIC
    workers: Workers = NO_WORKERS
    corrections: Corrections = NO_CORRECTIONS
    memories: tuple[PoolMemory, PoolMemory] | None = None
    """What is remembered of the sizes of prefill and of decode."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes that the pools should have: workers that take requests, start, or change into the role."""

    prefill: int
    decode: int
    reasons: tuple[str, ...]
    """Sentences that say why, with numbers."""
    state: PlannerState
    pools: tuple[PoolNeed, PoolNeed]
    """The numbers behind the sizes, of prefill and of decode."""


_DEFAULTS: Final = PlannerSettings()
Policies = Mapping[Role, PolicySize]
"""The answers of policies of the operator's own. A pool that has one follows it, and the planner decides the other one."""
NO_POLICIES: Final[Policies] = {}


def plan(
    observations: Observations,
    targets: Targets,
    limits: Limits,
    state: PlannerState,
    settings: PlannerSettings = _DEFAULTS,
    policies: Policies = NO_POLICIES,
    *,
    followed: bool = True,
) -> Plan:
    """Return the sizes of both pools for the next interval. The planner holds them where the observations are missing or
    broken. The limits are applied to what policies want as well.

    followed: False for a plan that nobody follows. It begins with the present sizes, and tells without delay or cool-down which
    sizes the load asks for.
    """
    if not followed:
        present = _present(observations, limits)
        prefill, decode = (free(size, observations.now_s, settings) for size in (present.prefill, present.decode))
        state = replace(state, sizes=present, memories=(prefill, decode))
    found = faults(observations)
    if not found and state.now_s is not None and observations.now_s <= state.now_s:
        found = (f"now_s went from {state.now_s:g} to {observations.now_s:g}",)
    if found:
        return _held(observations, limits, state, settings, found, policies)
    now_s = observations.now_s
    traffic = state.traffic.add(observations, settings)
    workers = state.workers.add(observations, settings)
    needs = (
        prefill_need(workers, prompt_demand(traffic, observations, settings), targets, settings),
        decode_need(workers, output_demand(traffic, observations, settings), targets, settings),
    )
    # A request takes at most the target for TTFT, and a step for each token. A ratio of tokens to requests of which nearly
    # none came says little, so the time is bounded.
    decoding_s = (traffic.output_ratio.value or 0.0) * (observations.decode.step_s or targets.tpot_s or 0.0)
    request_s = min((targets.ttft_s or 0.0) + decoding_s, settings.step_memory_s)
    corrections = corrected(
        state.corrections, observations, targets, _pools_of(observations, needs, state, settings), request_s, settings
    )
    began_s = now_s if state.began_s is None else state.began_s
    is_young = followed and now_s - began_s < settings.memory_s + 2 * request_s
    before = _ordered(_memories(observations, limits, state, settings), policies, now_s)
    memories = _sized(before, needs, corrections, targets, is_young, limits, state, now_s, settings, policies)
    sentences = [
        policy_sentence(role, policies[role], memory.wanted)
        if role in policies
        else need_sentence(role, need, one, targets, settings)
        for role, need, one, memory in zip(_ROLES, needs, corrections.pools, memories, strict=True)
    ]
    after = replace(
        state, began_s=began_s, now_s=now_s, traffic=traffic, workers=workers, corrections=corrections, memories=memories
    )
    if not is_young:
        sentences += [
            room_sentence(role, one.of(memory.room()))
            for role, one, memory in zip(_ROLES, corrections.pools, memories, strict=True)
            if role not in policies and corrections.keeps_room(one, targets.attainment, settings)
        ]
    planned = _placed(observations, limits, after, memories, _pools(needs, corrections, policies), sentences, settings)
    in_prefill, in_decode = (pool.limits if pool.size < pool.wanted else () for pool in planned.pools)
    return replace(
        planned, reasons=(*planned.reasons, *missed_sentences(corrections, targets, (in_prefill, in_decode), limits))
    )


def planned_once(
    window: Observations, whole: Observations, targets: Targets, limits: Limits, settings: PlannerSettings = _DEFAULTS
) -> Plan:
    """Return the sizes that the load of a window asks for, as a plan that nobody follows.

    whole: what happened since the start of the workers. It tells the rate of a prefill worker where the window does not.
    """
    workers = NO_WORKERS
    if workers.add(window, settings).tokens_per_s(settings) is None:
        workers = replace(workers, prompt_rate=workers.add(whole, settings).prompt_rate)
    return plan(window, targets, limits, PlannerState(workers=workers), settings, followed=False)


_ROLES: Final = (Role.PREFILL, Role.DECODE)


def _held(
    observed: Observations,
    limits: Limits,
    state: PlannerState,
    settings: PlannerSettings,
    found: tuple[str, ...],
    policies: Policies,
) -> Plan:
    """Return the plan without new knowledge: the sizes that the planner wants stay, within the limits as they are now."""
    memories = _ordered(_memories(observed, limits, state, settings), policies, observed.now_s)
    state = replace(state, memories=memories) if math.isfinite(observed.now_s) else state
    sentences = [
        policy_sentence(role, policies[role], memory.wanted)
        for role, memory in zip(_ROLES, memories, strict=True)
        if role in policies
    ]
    if len(sentences) < len(_ROLES):
        sentences.append(held_sentence(found))
    return _placed(observed, limits, state, memories, (PoolNeed(_ROLES[0]), PoolNeed(_ROLES[1])), sentences, settings)


def _ordered(memories: tuple[PoolMemory, PoolMemory], policies: Policies, now_s: float) -> tuple[PoolMemory, PoolMemory]:
    """Return the memories with the sizes that policies want. A pool keeps its size if its policy gives none."""
    prefill, decode = (
        begun(memory.wanted if (size := policies[role].workers) is None else size, now_s) if role in policies else memory
        for role, memory in zip(_ROLES, memories, strict=True)
    )
    return prefill, decode


def _pools_of(
    observed: Observations, needs: tuple[Need, Need], state: PlannerState, settings: PlannerSettings
) -> tuple[PoolSeen, PoolSeen]:
    """Return both pools for their corrections. A corrected need may not grow before a first plan, nor while workers are on the
    way to the pool, are missing, or would exceed a limit. Nor may that of decode workers that never ran as many sequences as
    they may: more workers would run even fewer, and then seem to do less."""
    sizes, memories = state.sizes, state.memories

    def pool(pool: PoolObserved, need: Need, size: int, memory: PoolMemory | None) -> PoolSeen:
        is_growing = pool.coming > 0 or pool.ready < size
        is_idle = need.room is not None and need.room.bound == TRUST_BOUND
        may_grow = memory is not None and not (is_growing or is_idle) and size >= memory.wanted
        most = pool.ready * (1 + settings.tolerance) if may_grow else 0.0
        return PoolSeen(pool.ready, need.workers or 0.0, most, is_growing)

    return (
        pool(observed.prefill, needs[0], sizes.prefill if sizes else 0, memories[0] if memories else None),
        pool(observed.decode, needs[1], sizes.decode if sizes else 0, memories[1] if memories else None),
    )


def _memories(
    observed: Observations, limits: Limits, state: PlannerState, settings: PlannerSettings
) -> tuple[PoolMemory, PoolMemory]:
    """Return the memories of both pools before this interval. The first one begins with the present sizes."""
    now_s = observed.now_s
    if state.memories is None:
        sizes = _present(observed, limits)
        return begun(sizes.prefill, now_s), begun(sizes.decode, now_s)
    prefill, decode = state.memories
    if state.now_s is not None and now_s - state.now_s > _GAP * observed.interval_s:
        return held(prefill, now_s, settings), held(decode, now_s, settings)
    return prefill, decode


def _present(observed: Observations, limits: Limits) -> PoolSizes:
    """Return the present sizes, each within its pool's own limits."""

    def size(pool: PoolObserved, own: PoolLimits) -> int:
        return min(max(pool.ready + pool.coming, own.min_workers), own.max_workers)

    return PoolSizes(size(observed.prefill, limits.prefill), size(observed.decode, limits.decode))


def _sized(
    memories: tuple[PoolMemory, PoolMemory],
    needs: tuple[Need, Need],
    corrections: Corrections,
    targets: Targets,
    is_young: bool,
    limits: Limits,
    state: PlannerState,
    now_s: float,
    settings: PlannerSettings,
    policies: Policies,
) -> tuple[PoolMemory, PoolMemory]:
    """Return the memories with the sizes that both pools want now. Where one lacks workers, the other gives those to spare.
    A pool with a policy gives none of its own accord. is_young: the planner has not seen enough to make a pool smaller."""

    def sized(memory: PoolMemory, need: Need, one: PoolCorrection) -> PoolMemory:
        if need.workers is None:  # the rate of a worker is not known
            return held(replace(memory, wanted=max(memory.wanted, 1)), now_s, settings)
        if is_young:
            return decided(memory, one.of(need.workers), now_s, settings, memory.wanted)
        memory = memory.seen(need.present_workers, now_s, settings)
        keeps = corrections.keeps_room(one, targets.attainment, settings)
        return decided(memory, one.of(need.workers), now_s, settings, one.of(memory.room()) if keeps else 0.0)

    prefill, decode = (
        memory if role in policies else sized(memory, need, one)
        for role, memory, need, one in zip(_ROLES, memories, needs, corrections.pools, strict=True)
    )
    if limits.can_flip and state.sizes is not None:
        lack = min(prefill.wanted, limits.prefill.max_workers) - state.sizes.prefill
        decode = decode if Role.DECODE in policies else given(decode, lack, now_s, settings)
        lack = min(decode.wanted, limits.decode.max_workers) - state.sizes.decode
        prefill = prefill if Role.PREFILL in policies else given(prefill, lack, now_s, settings)
    return prefill, decode


def _pools(needs: tuple[Need, Need], corrections: Corrections, policies: Policies) -> tuple[PoolNeed, PoolNeed]:
    """Return the numbers of both pools up to the need. A pool with a policy has none."""
    prefill, decode = (
        PoolNeed(role)
        if role in policies
        else PoolNeed(
            role,
            need.demand.total,
            need.worker_tokens_per_s,
            one.of(need.workers) / need.workers if need.workers else 1.0,
            None if need.workers is None else one.of(need.workers),
        )
        for role, need, one in zip(_ROLES, needs, corrections.pools, strict=True)
    )
    return prefill, decode


def _placed(
    observed: Observations,
    limits: Limits,
    state: PlannerState,
    memories: tuple[PoolMemory, PoolMemory],
    pools: tuple[PoolNeed, PoolNeed],
    sentences: list[str],
    settings: PlannerSettings,
) -> Plan:
    """Return the plan with the wanted sizes within all limits, and its reasons."""
    wanted = PoolSizes(memories[0].wanted, memories[1].wanted)
    goal, *names = within_limits(wanted, limits)
    sizes = startable(goal, wanted, observed.prefill, observed.decode, limits)
    names = [
        found + (("leaving",) if now < then else ())
        for found, now, then in zip(names, (sizes.prefill, sizes.decode), (goal.prefill, goal.decode), strict=True)
    ]
    before = state.sizes or sizes
    for role, memory, old, new, found in zip(
        _ROLES, memories, (before.prefill, before.decode), (sizes.prefill, sizes.decode), names, strict=True
    ):
        sentences += size_sentences(role, old, memory, new, found, limits)
        sentences += waiting_sentence(role, memory, observed.now_s, settings)
    if limits.can_flip:
        sentences += flip_sentence(before, sizes)
    prefill, decode = (
        replace(pool, wanted=memory.wanted, size=size, limits=found)
        for pool, memory, size, found in zip(pools, memories, (sizes.prefill, sizes.decode), names, strict=True)
    )
    return Plan(sizes.prefill, sizes.decode, tuple(sentences), replace(state, sizes=sizes), (prefill, decode))


# The observed values that are missing or broken. A plan from such values would be invented, so the sizes are held.

MOST: Final = 1e15
"""No rate and no count of a cluster is larger. Sums and products of values below it stay finite."""
_DEMAND: Final = ("requests_per_s", "prompt_tokens_per_s", "output_tokens_per_s", "queued_requests", "queued_prompt_tokens")
"""The router always knows these."""
_READY_PREFILL: Final = ("queued_tokens",)
_READY_DECODE: Final = ("sequences", "kv_used")
"""Heartbeats of workers that are ready always tell these."""


def faults(observed: Observations) -> tuple[str, ...]:
    """Return a phrase for each value that is missing or broken, such as "demand.requests_per_s is missing"."""
    found: list[str] = []
    if not (_is_number(observed.now_s) and _is_number(observed.interval_s) and observed.interval_s > 0):
        found.append(f"now_s is {observed.now_s} and interval_s is {observed.interval_s}")
    parts: tuple[tuple[str, DemandObserved | PoolObserved, tuple[str, ...]], ...] = (
        ("demand", observed.demand, _DEMAND),
        ("prefill", observed.prefill, _READY_PREFILL if observed.prefill.ready > 0 else ()),
        ("decode", observed.decode, _READY_DECODE if observed.decode.ready > 0 else ()),
    )
    for name, part, needed in parts:
        for field in fields(part):
            value = getattr(part, field.name)
            if value is None and field.name in needed:
                found.append(f"{name}.{field.name} is missing")
            elif value is not None and not _is_number(value):
                found.append(f"{name}.{field.name} is {value}")
    for name in ("ttft_met", "tpot_met", "ended", "refused", "first_gap_s"):
        value = getattr(observed, name)
        if value is not None and not _is_number(value):
            found.append(f"{name} is {value}")
    for field in fields(observed.missed):
        value = getattr(observed.missed, field.name)
        if not _is_number(value):
            found.append(f"missed.{field.name} is {value}")
    return tuple(found)


def _is_number(value: float) -> bool:
    """Tell whether a value is a number that a cluster can have."""
    return math.isfinite(value) and 0 <= value <= MOST
