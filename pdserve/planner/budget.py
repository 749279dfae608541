"""The limits of a plan: of each pool, of both together, and of what may be started beside workers that have not left yet.

The loss of a pool is the share of its need that is not served, `1 - workers / need`. Where the wanted sizes exceed a limit of
both pools, each worker in turn goes to the pool with the larger loss, beginning at the minima. So the pool with the smaller
loss gives way, and since a request needs both pools, the smaller share that is served is as large as it can be.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.core.worker import Role
from pdserve.planner.limits import Limits, PoolLimits, PoolSizes
from pdserve.planner.observations import PoolObserved

Fits = Callable[[PoolSizes], bool]


def within_limits(wanted: PoolSizes, limits: Limits) -> tuple[PoolSizes, tuple[str, ...], tuple[str, ...]]:
    """Return the sizes within all limits, and the names of the limits that changed the size of prefill, and of decode."""
    prefill, prefill_names = _clamped(Role.PREFILL, wanted.prefill, limits.prefill)
    decode, decode_names = _clamped(Role.DECODE, wanted.decode, limits.decode)
    goal = PoolSizes(prefill, decode)
    names = limits.exceeded(prefill, decode)
    if not names:
        return goal, prefill_names, decode_names
    minima = PoolSizes(limits.prefill.min_workers, limits.decode.min_workers)
    sizes = grown(minima, goal, wanted, lambda each: not limits.exceeded(each.prefill, each.decode))
    return (
        sizes,
        prefill_names + (names if sizes.prefill < prefill else ()),
        decode_names + (names if sizes.decode < decode else ()),
    )


def startable(goal: PoolSizes, need: PoolSizes, prefill: PoolObserved, decode: PoolObserved, limits: Limits) -> PoolSizes:
    """Return the sizes that may be reached now. Workers that drain still count against the limits of both pools.

    A worker that changes its role needs no new room. It counts as a worker of the pool whose workers cost more.
    """
    present = PoolSizes(prefill.ready + prefill.coming, decode.ready + decode.coming)
    more_prefill, more_decode = goal.prefill - present.prefill, goal.decode - present.decode
    dearer = _dearer(limits)
    flips = max(0, min(more_prefill, -more_decode), min(more_decode, -more_prefill)) if limits.can_flip and dearer else 0
    base = PoolSizes(
        min(goal.prefill, present.prefill + (flips if more_prefill > 0 else 0)),
        min(goal.decode, present.decode + (flips if more_decode > 0 else 0)),
    )
    prefill_uses, decode_uses = present.prefill + prefill.leaving, present.decode + decode.leaving
    if dearer is Role.PREFILL and more_prefill > 0:
        prefill_uses, decode_uses = prefill_uses + flips, decode_uses - flips
    elif dearer is Role.DECODE and more_decode > 0:
        prefill_uses, decode_uses = prefill_uses - flips, decode_uses + flips

    def fits(sizes: PoolSizes) -> bool:
        more = (prefill_uses + sizes.prefill - base.prefill, decode_uses + sizes.decode - base.decode)
        return not limits.exceeded(*more)

    return grown(base, goal, need, fits)


def grown(start: PoolSizes, goal: PoolSizes, need: PoolSizes, fits: Fits) -> PoolSizes:
    """Return the sizes after worker by worker went to the pool with the larger loss, up to the goal, while they fit."""
    if fits(goal):
        return goal
    sizes = start
    while True:
        steps = [
            (_loss(sizes.prefill, need.prefill), PoolSizes(sizes.prefill + 1, sizes.decode), sizes.prefill < goal.prefill),
            (_loss(sizes.decode, need.decode), PoolSizes(sizes.prefill, sizes.decode + 1), sizes.decode < goal.decode),
        ]
        fitting = [(loss, after) for loss, after, is_wanted in steps if is_wanted and fits(after)]
        if not fitting:
            return sizes
        sizes = max(fitting, key=lambda step: step[0])[1]


def _dearer(limits: Limits) -> Role | None:
    """Return the pool whose workers cost at least as much as those of the other one, by every measure. None: there is none."""
    measures = [(one.cpus, one.gpus, one.price_per_hour) for one in (limits.prefill, limits.decode)]
    pairs = list(zip(*measures, strict=True))
    if all(prefill >= decode for prefill, decode in pairs):
        return Role.PREFILL
    return Role.DECODE if all(decode >= prefill for prefill, decode in pairs) else None


def _loss(workers: int, need: int) -> float:
    """Return the share of the need that is not served."""
    return max(0.0, 1 - workers / need) if need > 0 else 0.0


def _clamped(role: Role, wanted: int, limits: PoolLimits) -> tuple[int, tuple[str, ...]]:
    """Return the size within the pool's own limits, and the name of the limit that changed it."""
    if wanted > limits.max_workers:
        return limits.max_workers, (f"{role.value}.max_workers",)
    if wanted < limits.min_workers:
        return limits.min_workers, (f"{role.value}.min_workers",)
    return wanted, ()
