"""The reasons of a plan, as sentences with numbers for operators."""

from __future__ import annotations

from dataclasses import fields
from typing import Final

from pdserve.core.worker import Role
from pdserve.planner.correction import Corrections, PoolCorrection
from pdserve.planner.demand import PhaseDemand
from pdserve.planner.hysteresis import PoolMemory
from pdserve.planner.limits import Limits, PoolSizes, Targets
from pdserve.planner.need import FEWEST_WORKERS, Need
from pdserve.planner.observations import Missed
from pdserve.planner.policy import PolicySize
from pdserve.planner.settings import PlannerSettings


def need_sentence(role: Role, need: Need, one: PoolCorrection, targets: Targets, settings: PlannerSettings) -> str:
    """Return why a pool needs so many workers."""
    what = "prompts" if role is Role.PREFILL else "outputs"
    demand = need.demand
    if need.workers is None:
        return f"The rate of a {role.value} worker is not known yet, so the {role.value} pool keeps its size."
    if role is Role.PREFILL and need.workers == FEWEST_WORKERS and demand.elsewhere is not None and one.margin <= 0.005:
        where = f"decode workers take {_number(demand.elsewhere)} tokens/s of them"
        return f"The prompts need no more than one prefill worker: {where}."
    if demand.total <= 0 and need.workers <= 0:
        return f"The {what} need no {role.value} worker: nothing comes and nothing waits."
    count = one.of(need.workers)
    corrected = ""
    if one.margin > 0.005:
        corrected = f", {count - need.workers:.1f} more than computed because requests missed their targets"
    elif one.margin < -0.005:
        corrected = f", {count / need.workers:.2f} times as many as computed because few requests missed a target because of it"
    begin = f"The {what} need {count:.1f} {role.value} {'worker' if count == 1 else 'workers'}{corrected}: "
    served = _served(role, need, targets)
    if served and need.measured_workers >= need.workers > 0:
        measure = f"are busy for {settings.max_utilisation:.0%} of the time" if role is Role.PREFILL else "hold their KV"
        return f"{begin}so many, with room to spare, {measure} at the load that was measured."
    if need.is_bounded:
        why = "their workers have time to spare, so at most twice those that are busy count"
        return f"{begin}{why}, although {_number(demand.total)} tokens/s would need more."
    prompts = f", and prompts keep {need.prompt_workers:.1f} busy" if need.prompt_workers >= 0.05 else ""
    return f"{begin}{_demanded(demand, settings)}{served}{prompts}."


def policy_sentence(role: Role, answer: PolicySize, wanted: int) -> str:
    """Return what a policy of the operator's own wants, or why its pool keeps its size."""
    if answer.workers is not None:
        return f"The policy {answer.name} wants {wanted} {role.value} {'worker' if wanted == 1 else 'workers'}."
    why = answer.fault or "it was not asked yet"
    return f"The policy {answer.name} gives no size, so the {role.value} pool keeps its {wanted}: {why}."


def _demanded(demand: PhaseDemand, settings: PlannerSettings) -> str:
    """Return the demand, and where it comes from."""
    text = f"{_number(demand.total)} tokens/s"
    backlog = demand.backlog_tokens / settings.horizon_s
    if demand.total > demand.measured + backlog:
        source = "of the same time in the last season" if demand.season >= demand.trend else "of the trend"
        return f"{text} {source} for {settings.start_s:g} s ahead, and {_number(demand.measured)} now"
    if backlog > 0.01 * demand.total:
        return f"{text}, of which {_number(backlog)} serve what waits within {settings.horizon_s:g} s"
    return text


def _served(role: Role, need: Need, targets: Targets) -> str:
    """Return what one worker may serve."""
    if need.worker_tokens_per_s is None:
        return ""
    rate = _number(need.worker_tokens_per_s)
    if role is Role.PREFILL:
        within = f" within TTFT {targets.ttft_s:g} s" if targets.ttft_s is not None else ""
        return f"; each may serve {rate} of its {_number(need.busy_tokens_per_s or 0.0)} tokens/s{within}"
    if need.room is None:
        return ""
    step = f"{need.room.sequences:.0f} sequences in steps of {need.room.step_s * 1e3:.1f} ms"
    return f"; each may serve {rate} tokens/s with {step}, bounded by {need.room.bound}"


def size_sentences(role: Role, before: int, memory: PoolMemory, size: int, names: tuple[str, ...], limits: Limits) -> list[str]:
    """Return what becomes of a pool's size, and which limits changed it."""
    found = []
    if size != before:
        found.append(f"The {role.value} pool {'grows' if size > before else 'shrinks'} from {before} to {_workers(size)}.")
    if names and size != memory.wanted:
        values = ", ".join(_limit(name, limits) for name in names)
        found.append(f"The {role.value} pool would have {_workers(memory.wanted)} and gets {size}: {values}.")
    return found


def _limit(name: str, limits: Limits) -> str:
    """Return a limit with its value, under the name of its setting."""
    if name == "leaving":
        return "workers that drain still use the room"
    pool, _, field = name.rpartition(".")
    return f"{setting_of(name)} is {getattr(getattr(limits, pool) if pool else limits, field):g}"


def setting_of(name: str) -> str:
    """Return the name of the setting behind a limit, as operators know it."""
    if name == "leaving":
        return "workers that drain"
    return name.replace("_workers", "_replicas") if "." in name else f"autoscaling.{name}"


def waiting_sentence(role: Role, memory: PoolMemory, now_s: float, settings: PlannerSettings) -> list[str]:
    """Return why a pool that is too large does not shrink yet."""
    need = memory.needs[-1][1] if memory.needs else memory.wanted
    if need >= memory.wanted:
        return []
    largest = memory.largest(now_s - settings.downscale_delay_s)
    rule = f"the largest need of the last {settings.downscale_delay_s:g} s counts, and it was {largest}"
    return [f"The {role.value} pool of {_workers(memory.wanted)} would do with {need}, but {rule}."]


def room_sentence(role: Role, workers: float) -> str:
    """Return that a pool keeps room for a rise."""
    why = "another rise like the largest one of the last day would make more requests miss their targets than may"
    return f"The {role.value} pool keeps room for {workers:.1f} workers: {why}."


def flip_sentence(before: PoolSizes, after: PoolSizes) -> list[str]:
    """Return that workers change their roles, where one pool shrinks and the other one grows."""
    count = min(after.prefill - before.prefill, before.decode - after.decode)
    back = min(before.prefill - after.prefill, after.decode - before.decode)
    if count <= 0 and back <= 0:
        return []
    who = "A worker changes its role" if max(count, back) == 1 else f"{max(count, back)} workers change their roles"
    return [f"{who} from {'decode to prefill' if count > 0 else 'prefill to decode'}."]


def held_sentence(faults: tuple[str, ...]) -> str:
    """Return why the sizes are held."""
    return f"The sizes are held, because the state of the cluster is not known: {', '.join(faults)}."


def _workers(count: int) -> str:
    """Return a number of workers in words."""
    return f"{count} worker" if count == 1 else f"{count} workers"


def _number(value: float) -> str:
    """Return a number for reading."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


CAUSES: Final = {
    "queue": "waited for room on a decode worker",
    "prefill_queue": "waited on a prefill worker",
    "prefill": "were computed too slowly on a prefill worker",
    "colocated": "waited or were computed too slowly on a decode worker",
    "transfer": "waited for their KV after the first token",
    "first_decode": "waited on a decode worker for the first decoded token",
    "steps": "had decode steps that were too slow",
    "failure": "had an attempt that failed",
}
"""The causes of missed targets, by the fields of `Missed`, in words that follow a share of the requests."""


def missed_sentences(
    corrections: Corrections, targets: Targets, lacking: tuple[tuple[str, ...], tuple[str, ...]], limits: Limits
) -> list[str]:
    """Return which share of the requests misses, why, and what no size of the pools mends.

    lacking: the names of the limits that keep prefill, and decode, smaller than they should be.
    """
    rate, may = corrections.rate.value or 0.0, 1 - targets.attainment
    causes = {field.name: mean.value or 0.0 for field, mean in zip(fields(Missed), corrections.causes, strict=False)}
    words = {CAUSES[name]: count for name, count in causes.items()} | {"were refused": corrections.refused.value or 0.0}
    missed = sum(words.values())
    if not rate or missed <= may * rate:
        return []
    first, *others = sorted(((count / missed, text) for text, count in words.items() if count > 0.1 * missed), reverse=True)
    parts = "; ".join(f"{share:.0%} {text}" for share, text in (first, *others))
    found = [f"{min(1.0, missed / rate):.1%} of the requests of late missed a target, where {may:.1%} may. Of these, {parts}."]
    for role, one, names in zip((Role.PREFILL, Role.DECODE), corrections.pools, lacking, strict=True):
        names = tuple(name for name in names if name != "leaving")
        if names and one.tried_missed > may * one.tried_ended:
            values = ", ".join(_limit(name, limits) for name in names)
            found.append(f"No size of the {role.value} pool within its limits attains the targets: {values}.")
    return found
