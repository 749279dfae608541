"""A request that ends its workers is found by the whole system, and takes nobody with it. All is by default settings.

The judge of these runs finds each rule that is switched off.
"""

from __future__ import annotations

from typing import Any

import pytest

from router.core.live_request import LiveRequest
from router.core.suspects import Suspects
from sim.faults.run import RunReport, run_with_poison
from sim.faults.watch import MAX_ENDED
from tests.sim.mutants import Mutant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEEDS = range(1, 5)
"""Odd ones have two such requests, even ones have one."""


def problems(seed: int, report: RunReport) -> list[str]:
    """Judge a run. The router may have refused requests while no worker was left, but it fails none that it took."""
    found, poison = list(report.problems), 1 + seed % 2
    if report.outcomes["poison_request"] != poison:
        found.append(f"of {poison} requests that end their workers, {report.outcomes['poison_request']} were found")
    if report.deaths > MAX_ENDED * poison or report.deaths != report.ended:
        found.append(f"{report.deaths} workers died")
    if report.unplaced or set(report.outcomes) - {"ok", "poison_request", "unavailable"}:
        found.append(f"a companion failed: {report.outcomes}")
    return found


def test_a_request_that_ends_its_workers_is_found_and_its_companions_are_served() -> None:
    assert [found for seed in SEEDS if (found := problems(seed, run_with_poison(seed)))] == []


def nobody_is_suspected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LiveRequest, "suspect", property(lambda self: False))


def a_suspect_fails_without_a_trial(patch: pytest.MonkeyPatch) -> None:
    real = Suspects.worker_died

    def worker_died(self: Any, worker: Any) -> None:
        real(self, worker)
        for work in worker.work.values():
            work.request.convicted = work.request.suspect

    patch.setattr(Suspects, "worker_died", worker_died)


def a_trial_begins_beside_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("router.core.suspects._harmless", lambda work: True)


def a_conviction_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    real = Suspects.worker_died

    def worker_died(self: Any, worker: Any) -> None:
        real(self, worker)
        for work in worker.work.values():
            work.request.convicted = False

    patch.setattr(Suspects, "worker_died", worker_died)


def a_trial_never_begins(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Suspects, "_may_try", lambda *args: False)


MUTANTS = (
    nobody_is_suspected,
    a_suspect_fails_without_a_trial,
    a_trial_begins_beside_others,
    a_conviction_is_forgotten,
    a_trial_never_begins,
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_of_poison_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert any(problems(seed, run_with_poison(seed)) for seed in SEEDS)
