"""Rule D1: one named actuator applies a plan, and only against the membership that the plan was computed from.

An actuator restarts all workers, one after the other, and looks at the cluster up to a second before its orders arrive. A
second one begins while the first one works, and two workers die by themselves. Orders go through the router's Admin service.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from router.grpc import admin
from router.grpc.scaling import ScalingMailbox
from sim.faults.faults import Fault, FaultKind
from sim.faults.run import RunReport, calm_plan, draw_asks, simulate
from sim.faults.tap import Census
from sim.faults.world import World, WorldShape

SEEDS = range(1, 5)
"""The first and the third found a mutant each when this was written."""


def upgraded(seed: int) -> tuple[RunReport, World]:
    rng = random.Random(seed)
    death_s, second_s = (rng.uniform(0.9, 1.1), 3.0) if seed % 2 else (4.0, rng.uniform(1.0, 1.6))
    faults = (
        Fault(0.5, FaultKind.UPGRADE, "router", rng.uniform(1.2, 1.6)),
        Fault(second_s, FaultKind.UPGRADE, "router", rng.uniform(0.3, 1.0), "back"),
        Fault(death_s, FaultKind.KILL, "prefill0", 0.05),
        Fault(rng.uniform(2.0, 5.0), FaultKind.KILL, "decode1", 0.3),
    )
    asks = draw_asks(random.Random(seed), 16, until_s=8.0, unruly=False)
    census = Census()
    report = simulate(seed, WorldShape(), replace(calm_plan(11.0), faults=faults), asks, census)
    assert census.world is not None
    return report, census.world


@pytest.mark.quick("1", "3")
@pytest.mark.parametrize("seed", SEEDS)
def test_two_actuators_and_two_deaths_restart_each_worker_once_and_one_at_a_time(seed: int) -> None:
    report, world = upgraded(seed)
    assert not report.problems
    assert report.outcomes == {"ok": 16}
    assert world.upgrade is not None
    assert world.upgrade.drained
    assert all(worker.incarnation != world.upgrade.old[name] for name, worker in world.workers.items()), "not all restarted"


def orders_of_an_ended_term_are_taken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ScalingMailbox, "check_term", lambda self, term: None)


def orders_for_another_incarnation_are_taken(patch: pytest.MonkeyPatch) -> None:
    real = admin.find
    patch.setattr(admin, "find", lambda snapshot, worker_id, incarnation=0: real(snapshot, worker_id))


@pytest.mark.parametrize("mutant", [orders_of_an_ended_term_are_taken, orders_for_another_incarnation_are_taken])
def test_a_broken_fence_is_found(mutant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    problems = (problem for seed in SEEDS for problem in upgraded(seed)[0].problems)
    assert any("drains before" in problem or "has restarted already" in problem for problem in problems)
