"""Workers that drive foreign engines, under the faults of any run. Their servers believe every ticket, as those of vLLM do."""

from __future__ import annotations

from typing import Any

import pytest

from decode_worker.engine_kv import InboundEngineKv
from pdserve.core.ids import ReaderId
from pdserve.core.lease import Lease, LeaseEvent
from sim.faults.run import RunReport, run_with_calm_foreign_engines, run_with_foreign_engines
from tests.sim.mutants import Mutant

SEEDS = range(1, 7)
MORE_SEEDS = range(7, 121)


def problems(report: RunReport) -> list[str]:
    """Judge a run. Without faults every committed ticket reaches a server, so that its KV is freed at once."""
    left = [f"{report.abandoned} committed tickets were abandoned"] if report.abandoned and not report.deaths else []
    return [*report.problems, *left]


def test_no_fault_gives_a_request_the_kv_of_another() -> None:
    reports = [run_with_foreign_engines(seed) for seed in SEEDS]
    assert [report.problems for report in reports if report.problems] == []
    assert sum(report.outcomes["ok"] for report in reports) > 100
    assert any(report.attempts for report in reports)


@pytest.mark.slow
def test_no_fault_of_many_gives_a_request_the_kv_of_another() -> None:
    assert [report.problems for seed in MORE_SEEDS if (report := run_with_foreign_engines(seed)).problems] == []


def test_clients_that_leave_abandon_no_ticket_that_was_committed() -> None:
    reports = [run_with_calm_foreign_engines(seed) for seed in SEEDS]
    assert [found for report in reports if (found := problems(report))] == []
    assert sum(report.outcomes["cancelled"] for report in reports) > 5


def a_lease_is_committed_to_every_reader(patch: pytest.MonkeyPatch) -> None:
    real = Lease.commit_event

    def event(self: Lease, reader: ReaderId, *args: Any) -> LeaseEvent:
        found = real(self, reader, *args)
        return LeaseEvent.COMMIT_AGAIN if found is LeaseEvent.COMMIT_BY_OTHER else found

    patch.setattr(Lease, "commit_event", event)


def a_ticket_of_a_request_that_ended_is_dropped(patch: pytest.MonkeyPatch) -> None:
    real = InboundEngineKv.abandon

    async def abandon(self: InboundEngineKv, *, release: bool) -> None:
        self.take_kv = lambda: None  # type: ignore[method-assign]
        await real(self, release=release)

    patch.setattr(InboundEngineKv, "abandon", abandon)


MUTANTS = (a_lease_is_committed_to_every_reader, a_ticket_of_a_request_that_ended_is_dropped)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_of_tickets_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    runs = (run for seed in range(1, 61) for run in (run_with_calm_foreign_engines(seed), run_with_foreign_engines(seed)))
    assert any(problems(report) for report in runs)
