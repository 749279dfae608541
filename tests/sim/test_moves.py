"""Planned moves lose nothing: a worker that drains or changes its role is empty soon, whatever the lengths of its answers, and
its requests pay with nothing. All is by default settings."""

from __future__ import annotations

from typing import Any

import pytest

from router.core.events import SendCancel
from router.core.migration import Migration
from router.core.requests import Requests
from router.core.router_core import RouterCore
from sim.faults.run import RunReport, run_with_moves
from tests.sim.mutants import Mutant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEEDS = range(1, 6)
DRAIN_S = 1.5
"""A worker that drains has left after this time. Its answers take at least 2.4 s, of 60 steps; a replay of one takes about ten
steps, and then it must be seen empty twice."""


def problems(report: RunReport) -> list[str]:
    """Judge a run. Nothing is lost, nothing is tried again, and no worker waits for its answers."""
    found = list(report.problems)
    if report.outcomes.total() != report.outcomes["ok"] or report.attempts or report.lost:
        found.append(f"{report.outcomes}, {report.attempts} retries, {report.lost} workers lost")
    if report.longest_drain_s > DRAIN_S:
        found.append(f"a worker drained for {report.longest_drain_s:.2f} s")
    return found


def test_drains_and_flips_take_a_moment_and_cost_no_attempt() -> None:
    reports = [run_with_moves(seed) for seed in SEEDS]
    assert [found for report in reports if (found := problems(report))] == []
    assert sum(report.migrations for report in reports) > 2 * len(SEEDS)
    assert sum(report.flips for report in reports) > 2
    assert sum(report.deaths for report in reports) > 2, "workers that drain end"


def a_move_counts_an_attempt(patch: pytest.MonkeyPatch) -> None:
    real = Migration._migrate

    def migrate(self: Any, request: Any, worker: Any, now_s: float) -> Any:
        request.machine.attempt += 1
        return (yield from real(self, request, worker, now_s))

    patch.setattr(Migration, "_migrate", migrate)


def a_move_takes_a_retry(patch: pytest.MonkeyPatch) -> None:
    real = RouterCore._send_away

    def send_away(self: Any, *args: Any) -> Any:
        self.recovery.bucket.take()
        return real(self, *args)

    patch.setattr(RouterCore, "_send_away", send_away)


def nobody_moves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Migration, "look", lambda self: None)


def what_has_moved_runs_on(patch: pytest.MonkeyPatch) -> None:
    """Its old worker is not told, computes it to the end, and cannot leave before."""
    real = Requests.withdraw

    def withdraw(self: Any, request: Any) -> Any:
        moved = request.migrations and not request.machine.terminal
        return [e for e in real(self, request) if not (moved and isinstance(e, SendCancel))]

    patch.setattr(Requests, "withdraw", withdraw)


def a_move_forgets_a_token(patch: pytest.MonkeyPatch) -> None:
    real = Migration._migrate

    def migrate(self: Any, request: Any, worker: Any, now_s: float) -> Any:
        moved = yield from real(self, request, worker, now_s)
        if moved:
            request.emitted.pop()
            request.resumed = tuple(request.emitted)
        return moved

    patch.setattr(Migration, "_migrate", migrate)


MUTANTS = (a_move_counts_an_attempt, a_move_takes_a_retry, nobody_moves, what_has_moved_runs_on, a_move_forgets_a_token)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_of_planned_moves_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert any(problems(run_with_moves(seed)) for seed in SEEDS)
