"""The plan of faults of one run. A plan is data: it is drawn from a seed, or made by hand for one cell of the matrix."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from sim.faults.transfer import ReadFaults
from sim.world.network import Weather

WORKERS: Final = ("prefill0", "prefill1", "decode0", "decode1")
ALL: Final = (*WORKERS, "router")


WRONG_DELTAS: Final = ("number", "key", "digest")
"""The ways in which a delta is wrong: it has the number of the next delta, it lacks a key, or its digest is wrong."""


class FaultKind(Enum):
    """The kind of a fault, with the use of `Fault.target`, `lasts_s` and `other`."""

    KILL = "kill"  # the target is killed, and restarted `lasts_s` later
    RANK = "rank"  # rank `other` of the target dies, and the target a little later; it is restarted after `lasts_s`
    STALL = "stall"  # the whole target stops for `lasts_s`
    STALL_LOOP = "stall_loop"  # the target's loop thread stops for `lasts_s`
    STALL_ENGINE = "stall_engine"  # the target's engine stops for `lasts_s`
    HANG_ENGINE = "hang_engine"  # the target's engine stops for good; only the worker itself can end the process
    NO_NUMBERS = "no_numbers"  # for `lasts_s` the target's logits are not finite numbers
    CUT = "cut"  # for `lasts_s` the paths between `target` and `other` are cut, both ways
    CUT_ONE_WAY = "cut_one_way"  # for `lasts_s` the path from `target` to `other` is cut
    RESET = "reset"  # all connections break, and no process dies; `target` is not used
    DUPLICATE = "duplicate"  # for `lasts_s` a second process runs under the target's worker_id
    WRONG_KEYS = "wrong_keys"  # the target's next delta of its prefix keys is wrong; `other` says in which way
    DRAIN = "drain"  # the worker ends when it is empty, and is restarted; `other` "router" asks for it, "" is a signal
    FLIP = "flip"  # the target takes its other role: `other` "router" asks for it, "again" repeats that, "" is a signal
    UPGRADE = (
        "upgrade"  # an actuator restarts all workers, one by one; its orders come `lasts_s` late; `other` "back": last first
    )
    BUDGET = "budget"  # an operator lets a step of the target have at most `other` tokens, as digits


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a plan. `target` and `other` are names of processes, unless the kind says otherwise."""

    at_s: float
    kind: FaultKind
    target: str
    lasts_s: float = 0.0
    other: str = ""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """All faults of one run."""

    faults: tuple[Fault, ...]
    weather: Weather
    reads: ReadFaults
    clock_rates: dict[str, float]  # by name of the process; 1.0 is an exact clock
    until_s: float  # faults and bad weather are over at this time


_KINDS: Final = (
    *(FaultKind.KILL,) * 4,
    *(FaultKind.STALL,) * 3,
    *(FaultKind.STALL_LOOP,) * 3,
    *(FaultKind.STALL_ENGINE,) * 2,
    *(FaultKind.CUT,) * 2,
    *(FaultKind.CUT_ONE_WAY,) * 2,
    FaultKind.RESET,
    FaultKind.DRAIN,
)


def draw_plan(rng: random.Random, *, until_s: float) -> FaultPlan:
    """Draw a plan of 0 to 10 faults. Half of the plans have at most 2, so that long stretches of ordinary work occur too."""
    count = rng.choice((0, 1, 2, 4, 7, 10))
    faults = tuple(sorted((_fault(rng, until_s) for _ in range(count)), key=lambda fault: fault.at_s))
    weather = Weather(
        delay_s=rng.choice((0.0002, 0.001, 0.005, 0.02)),
        late=rng.choice((0.0, 0.0, 0.01, 0.05)),
        late_s=rng.choice((0.05, 0.5, 3.0)),
        link_loss=rng.choice((0.0, 0.0, 0.0, 0.002, 0.01)),
        watch_loss=rng.choice((0.0, 0.0, 0.1, 0.5)),
        call_loss=rng.choice((0.0, 0.0, 0.02, 0.1, 0.3)),
    )
    reads = ReadFaults(
        slow=rng.choice((0.0, 0.1, 0.5)),
        slow_s=rng.choice((0.1, 1.0, 6.0)),
        failed=rng.choice((0.0, 0.0, 0.1)),
        adrift=rng.choice((0.0, 0.0, 0.02)),
        stuck=rng.choice((0.0, 0.0, 0.0, 0.01)),
        own_network=rng.random() < 0.5,
    )
    skew = rng.choice((0.0, 0.0, 0.05, 0.4))
    rates = {name: 1.0 + rng.uniform(-skew, skew) for name in ALL}
    return FaultPlan(faults, weather, reads, rates, until_s)


def with_lost_numbers(plan: FaultPlan, rng: random.Random) -> FaultPlan:
    """Add, to a third of the plans, workers whose logits are not numbers, for a few steps or for some time."""
    count = rng.choice((0, 0, 0, 0, 1, 3))
    faults = [
        Fault(rng.uniform(0.1, plan.until_s * 0.6), FaultKind.NO_NUMBERS, rng.choice(WORKERS), rng.choice((0.02, 0.3, 2.0)))
        for _ in range(count)
    ]
    return replace(plan, faults=(*plan.faults, *faults))


def with_sick_workers(plan: FaultPlan, rng: random.Random) -> FaultPlan:
    """Add, to an eighth of the plans, a worker that fails all its requests until the faults end. It is ejected in that time."""
    if rng.random() < 7 / 8:
        return plan
    at_s = rng.uniform(0.5, plan.until_s * 0.4)
    sick = Fault(at_s, FaultKind.NO_NUMBERS, rng.choice(WORKERS), plan.until_s - at_s)
    return replace(plan, faults=(*plan.faults, sick))


def with_duplicates(plan: FaultPlan, rng: random.Random) -> FaultPlan:
    """Add, to a third of the plans, processes that are started with a worker id that is in use."""
    count = rng.choice((0, 0, 0, 0, 1, 2))
    faults = []
    for _ in range(count):
        at_s = rng.uniform(0.1, plan.until_s * 0.6)
        lasts_s = min(rng.choice((0.3, 2.0, 6.0)), plan.until_s - at_s)
        faults.append(Fault(at_s, FaultKind.DUPLICATE, rng.choice(WORKERS), lasts_s))
    return replace(plan, faults=(*plan.faults, *faults))


def with_wrong_keys(plan: FaultPlan, rng: random.Random) -> FaultPlan:
    """Add, to half of the plans, workers that report a wrong change of their prefix keys."""
    count = rng.choice((0, 0, 1, 4))
    faults = [
        Fault(rng.uniform(0.5, plan.until_s), FaultKind.WRONG_KEYS, rng.choice(WORKERS), other=rng.choice(WRONG_DELTAS))
        for _ in range(count)
    ]
    return replace(plan, faults=(*plan.faults, *faults))


def with_hung_engines(plan: FaultPlan, rng: random.Random) -> FaultPlan:
    """Add engines that hang for good to a third of the plans."""
    count = rng.choice((0, 0, 0, 0, 1, 2))
    faults = [Fault(rng.uniform(0.1, plan.until_s * 0.6), FaultKind.HANG_ENGINE, rng.choice(WORKERS)) for _ in range(count)]
    return replace(plan, faults=(*plan.faults, *faults))


def with_dead_ranks(plan: FaultPlan, rng: random.Random) -> FaultPlan:
    """Add workers that die rank by rank to half of the plans. A worker of one rank dies at once."""
    faults = [
        Fault(
            rng.uniform(0.1, plan.until_s * 0.8),
            FaultKind.RANK,
            rng.choice(WORKERS),
            rng.choice((0.05, 0.3, 1.0)),
            other=rng.choice(("0", "1", "1", "1")),
        )
        for _ in range(rng.choice((0, 0, 1, 3)))
    ]
    return replace(plan, faults=(*plan.faults, *faults))


def with_budgets(plan: FaultPlan, rng: random.Random) -> FaultPlan:
    """Add, to half of the plans, operators who change the budgets of steps. Some ask for more than the worker has."""
    count = rng.choice((0, 0, 1, 4))
    faults = [
        Fault(
            rng.uniform(0.1, plan.until_s),
            FaultKind.BUDGET,
            rng.choice(WORKERS),
            other=rng.choice(("8", "9", "12", "16", "32")),
        )
        for _ in range(count)
    ]
    return replace(plan, faults=(*plan.faults, *faults))


def with_role_flips(plan: FaultPlan, rng: random.Random) -> FaultPlan:
    """Add, to half of the plans, role flips. Some are asked for twice, and some are turned back. All workers of a role may have
    flipped away for some time."""
    count = rng.choice((0, 0, 0, 1, 2, 5))
    faults = []
    for _ in range(count):
        at_s, name, other = rng.uniform(0.3, plan.until_s * 0.8), rng.choice(WORKERS), rng.choice(("", "router"))
        flip = Fault(at_s, FaultKind.FLIP, name, other=other)
        again_s = at_s + rng.choice((0.0, 0.01, 0.2, 1.0, 3.0))
        again = replace(flip, at_s=again_s, other="again" if other else "")
        faults += [flip, *(again for _ in range(rng.choice((0, 0, 1))))]
    return replace(plan, faults=(*plan.faults, *faults))


def _fault(rng: random.Random, until_s: float) -> Fault:
    kind = rng.choice(_KINDS)
    at_s = rng.uniform(0.1, until_s * 0.8)
    lasts_s = rng.choice((0.05, 0.3, 1.0, 3.0, 6.0)) * rng.uniform(0.5, 1.5)
    lasts_s = min(lasts_s, until_s - at_s)
    if kind in (FaultKind.CUT, FaultKind.CUT_ONE_WAY):
        target, other = rng.sample(ALL, 2)
        return Fault(at_s, kind, target, lasts_s, other)
    if kind is FaultKind.DRAIN:
        return Fault(at_s, kind, rng.choice(WORKERS), lasts_s, rng.choice(("", "router")))
    targets = WORKERS if kind is FaultKind.STALL_ENGINE else (*WORKERS, *WORKERS, "router")
    return Fault(at_s, kind, rng.choice(targets), lasts_s)
