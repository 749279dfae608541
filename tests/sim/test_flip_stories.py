"""Role flips in the simulation, one story each."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from sim.faults.client import ClientAsk
from sim.faults.faults import Fault, FaultKind
from sim.faults.run import RunReport, calm_plan, draw_asks, simulate
from sim.faults.tap import Census
from sim.faults.world import World, WorldShape


def run(seed: int, faults: tuple[Fault, ...], asks: list[ClientAsk]) -> tuple[RunReport, World]:
    census = Census()
    report = simulate(seed, WorldShape(), replace(calm_plan(8.0), faults=faults), asks, census)
    assert not report.problems
    assert census.world is not None
    return report, census.world


def asked(seed: int, deadlines_s: tuple[float, ...] = (20.0,)) -> list[ClientAsk]:
    asks = draw_asks(random.Random(seed), 24, until_s=6.0, unruly=False)
    return [replace(ask, deadline_s=deadlines_s[n % len(deadlines_s)]) for n, ask in enumerate(asks)]


def test_flips_there_and_back_cost_no_request_an_error() -> None:
    faults = tuple(Fault(at_s, FaultKind.FLIP, name, other="router") for at_s, name in ((0.8, "prefill1"), (3.0, "prefill1")))
    report, world = run(11, faults, asked(11))
    assert report.outcomes == {"ok": 24}
    assert report.flips == 2
    assert world.workers["prefill1"].lives == 3
    assert world.workers["prefill1"].process.role == "prefill"
    assert world.restarts == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_requests_end_although_all_workers_of_a_role_have_flipped_away(role: str) -> None:
    """Signals are not refused. Requests wait, are colocated, or fail with a typed error. An operator flips a worker back."""
    faults = tuple(Fault(1.0, FaultKind.FLIP, f"{role}{i}") for i in range(2))
    report, world = run(9, faults, asked(9, (3.0, 20.0)))
    assert report.flips == 3
    assert set(report.outcomes) <= {"ok", "unavailable", "deadline_exceeded"}
    assert 0 < report.outcomes["ok"] < 24
    assert world.lacked_a_role


def test_the_router_refuses_to_flip_the_last_decode_worker() -> None:
    faults = tuple(Fault(1.0, FaultKind.FLIP, f"decode{i}", other="router") for i in range(2))
    report, world = run(9, faults, asked(9))
    assert report.outcomes == {"ok": 24}
    assert report.flips == 1
    assert sorted(worker.process.role for worker in world.workers.values()) == ["decode", "prefill", "prefill", "prefill"]


def test_an_order_that_is_repeated_does_not_flip_the_worker_back() -> None:
    faults = (
        Fault(1.0, FaultKind.FLIP, "prefill0", other="router"),
        *(Fault(1.0 + 0.1 * i, FaultKind.FLIP, "prefill0", other="again") for i in range(30)),
    )
    report, world = run(12, faults, asked(12))
    assert report.outcomes == {"ok": 24}
    assert world.workers["prefill0"].process.role == "decode"
    assert report.flips == 1


def test_a_worker_that_dies_during_its_flip_comes_back_in_its_first_role() -> None:
    faults = (Fault(1.0, FaultKind.FLIP, "decode1", other="router"), Fault(1.003, FaultKind.KILL, "decode1", 0.3))
    report, world = run(13, faults, asked(13))
    assert report.outcomes == {"ok": 24}
    assert report.flips == 0
    assert world.workers["decode1"].process.role == "decode"


def test_a_drain_during_a_flip_ends_the_worker() -> None:
    faults = (Fault(1.0, FaultKind.FLIP, "decode1", other="router"), Fault(1.01, FaultKind.DRAIN, "decode1", other="router"))
    report, world = run(14, faults, asked(14))
    assert report.outcomes == {"ok": 24}
    assert world.restarts == 1
    assert world.workers["decode1"].process.role == "decode"
