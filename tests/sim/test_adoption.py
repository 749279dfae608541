"""Routers and links may end: workers live on, forget what the old router wanted and serve the new one. Streams that break while
both ends live are taken up again, and nobody is lost."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.rpc.bundle import Incoming, Kept, Outbound
from pdserve.worker.link import RouterLink as WorkersEnd
from pdserve.worker.member import LinkMember
from router.workers.link import Link as RoutersEnd
from sim.faults.run import RunReport, run_with_adoptions, run_with_broken_links
from tests.sim.mutants import Mutant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEEDS = range(1, 4)


def adopted(report: RunReport) -> list[str]:
    """Judge a run in which routers end. No worker may end with one."""
    found = list(report.problems)
    if report.deaths:
        found.append(f"{report.deaths} workers died")
    if report.adopted < 8:
        found.append(f"routers found {report.adopted} workers of those before")
    return found


def unbroken(report: RunReport) -> list[str]:
    """Judge a run in which streams of links break, and the links do not."""
    found = list(report.problems)
    if report.outcomes.total() != report.outcomes["ok"] or report.attempts or report.lost:
        found.append(f"{report.outcomes}, {report.attempts} retries, {report.lost} workers lost")
    if report.resumed < 40:
        found.append(f"{report.resumed} streams were taken up again")
    return found


def test_workers_outlive_one_router_after_the_other() -> None:
    assert [found for seed in SEEDS if (found := adopted(run_with_adoptions(seed)))] == []


def test_streams_that_break_cost_nothing() -> None:
    assert [found for seed in SEEDS if (found := unbroken(run_with_broken_links(seed)))] == []


def a_worker_goes_on_for_a_router_that_has_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LinkMember, "_on_link_lost", lambda self: None)


def a_new_router_is_told_no_keys(patch: pytest.MonkeyPatch) -> None:
    """Only what changes after it has come."""

    def on_link_lost(self: Any) -> None:
        host, role = self._started()
        role.on_link_lost()
        host.counted.forget()

    patch.setattr(LinkMember, "_on_link_lost", on_link_lost)


def a_worker_waits_for_its_old_router(patch: pytest.MonkeyPatch) -> None:
    """It asks to go on with the link of a router that has ended, again and again."""
    real = WorkersEnd._take_up

    async def take_up(self: Any) -> Any:
        reason, _ = await real(self)
        self._fruitless = 0
        return reason, False

    patch.setattr(WorkersEnd, "_take_up", take_up)


def nothing_is_taken_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RoutersEnd, "outlives_stream", property(lambda self: False))


def the_first_message_is_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    real = Kept.after
    patch.setattr(Kept, "after", lambda self, number: real(self, number)[1:])


def more_is_confirmed_than_has_come(patch: pytest.MonkeyPatch) -> None:
    real = Kept.confirm
    patch.setattr(Kept, "confirm", lambda self, number: real(self, number + 1))


def more_is_said_to_have_come(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Incoming, "last", property(lambda self: self._last + 1))


def what_has_come_is_sent_again_and_taken_for_new(patch: pytest.MonkeyPatch) -> None:
    real = Kept.after
    patch.setattr(Kept, "after", lambda self, number: real(self, number) * 2)
    patch.setattr(Incoming, "is_new", lambda self, number: setattr(self, "_last", max(self._last, number)) or True)


def nothing_is_sent_again(patch: pytest.MonkeyPatch) -> None:
    real = Outbound.again

    def again(self: Any, number: int) -> None:
        real(self, number)
        self._again.clear()

    patch.setattr(Outbound, "again", again)


ROUTER_MUTANTS = (
    a_worker_goes_on_for_a_router_that_has_ended,
    a_new_router_is_told_no_keys,
    a_worker_waits_for_its_old_router,
)
LINK_MUTANTS = (
    nothing_is_taken_up,
    the_first_message_is_not_sent_again,
    more_is_confirmed_than_has_come,
    more_is_said_to_have_come,
    what_has_come_is_sent_again_and_taken_for_new,
    nothing_is_sent_again,
)


@pytest.mark.parametrize("mutant", ROUTER_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_of_adoption_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert any(adopted(run_with_adoptions(seed)) for seed in SEEDS)


@pytest.mark.parametrize("mutant", LINK_MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_of_taking_up_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    assert any(unbroken(run_with_broken_links(seed)) for seed in SEEDS)
