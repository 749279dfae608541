"""A lost worker costs its requests a replay and nothing else, with the default budget of retries. The watch over the router's
core finds each rule that is switched off."""

from __future__ import annotations

from typing import Any

import pytest

from router.core.recovery import Cost, Recovery, RetryBucket
from router.core.suspects import Suspects
from sim.faults.run import RunReport, run_with_lost_workers, run_with_sick_workers
from tests.sim.mutants import Mutant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEEDS = range(1, 5)
"""In runs of odd ones four workers die. In the others two workers stand still, twice each, and come back."""
BURST = 10
"""The retries with which the bucket begins by default."""


def problems(seed: int, report: RunReport) -> list[str]:
    """Judge a run. Each request is replayed for each worker that it loses."""
    found = list(report.problems)
    if report.outcomes.total() != report.outcomes["ok"]:
        found.append(f"a request failed: {report.outcomes}")
    if report.lost != 4 or report.deaths != 4 * (seed % 2):
        found.append(f"{report.lost} workers were lost, and {report.deaths} died")
    if report.attempts <= 2 * BURST:
        found.append("too few replays to show that they are free")
    return found


def test_every_stream_survives_the_loss_of_one_worker_after_the_other() -> None:
    assert [found for seed in SEEDS if (found := problems(seed, run_with_lost_workers(seed)))] == []


def a_loss_costs_a_retry(patch: pytest.MonkeyPatch) -> None:
    real = Recovery._refusal

    def refusal(self: Any, request: Any, error: Any, cost: Cost) -> Any:
        return real(self, request, error, Cost.ATTEMPT_AND_RETRY)

    patch.setattr(Recovery, "_refusal", refusal)


def a_loss_costs_an_attempt(patch: pytest.MonkeyPatch) -> None:
    real = Recovery._refusal

    def refusal(self: Any, request: Any, error: Any, cost: Cost) -> Any:
        return real(self, request, error, Cost.ATTEMPT if cost is Cost.NOTHING else cost)

    patch.setattr(Recovery, "_refusal", refusal)


def only_a_full_bucket_pays_for_a_loss(patch: pytest.MonkeyPatch) -> None:
    """The loss takes nothing out, but is refused when the bucket is empty, as it was from the start."""
    patch.setattr(RetryBucket, "empty", property(lambda self: True))
    real = Recovery._refusal

    def refusal(self: Any, request: Any, error: Any, cost: Cost) -> Any:
        return "the cluster's retries are used up" if self.bucket.empty else real(self, request, error, cost)

    patch.setattr(Recovery, "_refusal", refusal)


def who_comes_back_has_died(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Suspects, "came_back", lambda self, incarnation: None)


LOSS_MUTANTS = (a_loss_costs_a_retry, a_loss_costs_an_attempt, only_a_full_bucket_pays_for_a_loss, who_comes_back_has_died)


@pytest.mark.parametrize("mutant", LOSS_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_of_free_replays_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert any(problems(seed, run_with_lost_workers(seed)) for seed in SEEDS)


def a_failure_costs_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Recovery, "_refusal", lambda self, request, error, cost: None)


def a_second_try_costs_a_retry_at_once(patch: pytest.MonkeyPatch) -> None:
    """Also where the request was not at fault."""
    real = Recovery.work_failed

    def work_failed(self: Any, work: Any, event: Any, now_s: float) -> Any:
        for _ in range(2):
            self.bucket.take()
        return real(self, work, event, now_s)

    patch.setattr(Recovery, "work_failed", work_failed)


@pytest.mark.parametrize("mutant", [a_failure_costs_nothing, a_second_try_costs_a_retry_at_once], ids=lambda m: m.__name__)
def test_a_broken_price_of_failures_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sick workers of one role leave nobody who could serve."""
    mutant(monkeypatch)
    assert any(run_with_sick_workers(seed).problems for seed in (2, 5, 8))
