"""Rules of ejection broken on purpose, one at a time. For each, a story that holds without the mutant must fail with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import pytest

from pdserve.core.errors import PdserveError
from pdserve.core.worker import Role
from router.core import outliers
from router.core.health import Health, Pairs
from router.core.live_request import LiveRequest
from router.core.outliers import Account

from ...core_peers import Job, Stage
from .sick import BUG, break_down, check_half_stays, later, out, peer_of, poison, pools, serve
from .test_unreachable import BrokenNic, cut_off

Mutant = Callable[[pytest.MonkeyPatch], None]
Story = Callable[[], None]


# Stories -----------------------------------------------------------------------------------------------------------


def a_broken_worker_is_ejected_and_costs_nothing() -> None:
    stage = pools(1, 4, retry_burst=100)
    break_down(stage, "decode-3")
    outcomes = serve(stage, 80, each_s=0.3)
    assert [o.ended for o in outcomes] == [["done"]] * 80
    assert out(stage) == ["decode-3"]


def half_of_the_pool_stays() -> None:
    stage = pools(1, 4, retry_burst=1000)
    break_down(stage, "decode-0", "decode-1", "decode-2")
    serve(stage, 100, each_s=0.5, check=lambda: check_half_stays(stage))


def a_pool_that_shrinks_still_serves() -> None:
    stage = pools(1, 4)
    break_down(stage, "decode-3")
    serve(stage, 80, each_s=0.3)
    assert out(stage) == ["decode-3"]
    for n in range(3):
        stage.leave(peer_of(stage, f"decode-{n}"))
        later(stage, 0.5)
        check_half_stays(stage)


def hostile_prompts_eject_nobody() -> None:
    stage = pools(2, 4, retry_burst=1000)
    poison(stage, after=2)
    for _ in range(40):
        serve(stage, 2, each_s=0.1, name="poison", max_tokens=6)
        serve(stage, 1, each_s=0.1, name="good", max_tokens=6)
        assert not out(stage)


def hostile_prompts_of_a_few_workers_eject_nobody() -> None:
    """Only two workers of eight are long enough for them, so these fail much more often than their pool."""
    stage = Stage(retry_burst=1000)
    stage.join("prefill-0", Role.PREFILL)
    for n in range(8):
        stage.join(f"decode-{n}", Role.DECODE, max_model_len=64 if n < 2 else 32)
    poison(stage, after=2)
    for _ in range(30):
        serve(stage, 1, each_s=0.5, name="poison", prompt_len=40, max_tokens=6)
        serve(stage, 8, each_s=0.1, name="good", max_tokens=3)
        assert not out(stage)


def second_tries_wait_for_another_worker() -> None:
    stage = pools(1, 2)
    outcomes = [stage.submit(f"r{n}", max_tokens=9) for n in range(8)]
    for peer in list(stage.peers.values()):
        stage.deliver(peer, len(peer.upward))
    break_down(stage, "decode-1")
    stage.run()
    assert [o.ended for o in outcomes] == [["done"]] * 8


def a_fault_that_all_share_ejects_nobody() -> None:
    """Every third request fails once, on whatever worker, and its second try passes."""
    stage = pools(1, 4, retry_burst=1000)
    failed: set[str] = set()

    def fault(job: Job) -> PdserveError | None:
        name = job.work.request_id
        if not name.startswith("doomed") or name in failed:
            return None
        failed.add(name)
        return BUG

    for peer in stage.peers.values():
        if peer.hello.role is Role.DECODE:
            peer.fault = fault
    random = Random(1)
    for _ in range(200):
        serve(stage, 1, each_s=0.3, name=random.choice(("doomed", "r", "r")))
    assert len(failed) > 50
    assert not stage.core.health.ejections


def a_worker_that_fails_again_stays_out_longer() -> None:
    stage = pools(1, 4, retry_burst=1000)
    break_down(stage, "decode-3")
    serve(stage, 200, each_s=3.0)
    assert stage.core.health.ejections.total() <= 3


def a_recent_failure_is_load() -> None:
    stage = pools(1, 4, eject_workers=False)
    break_down(stage, "decode-3")
    outcomes = serve(stage, 80, each_s=0.1)
    assert sum(o.report.attempts - 1 for o in outcomes if o.report) < 10


def a_partition_of_the_pools_ejects_nobody() -> None:
    stage = pools(4, 4, retry_burst=100)
    for n in range(4):
        cut_off(stage, f"decode-{n}")
    serve(stage, 40)
    assert not stage.core.health.ejections


def an_end_that_reads_from_nobody_is_left_alone() -> None:
    cluster = BrokenNic(8, 6)
    cluster.run(90.0, 5)
    assert max(cluster.lost_at) < 60.0


# Mutants -----------------------------------------------------------------------------------------------------------


def nobody_is_ejected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Health, "_eject", lambda *args: False)


def more_than_half_is_ejected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Health, "_may_lose", lambda self, role: True)
    patch.setattr(Health, "_readmit", lambda self, role, now_s: None)


def the_ejected_do_not_come_back_for_a_small_pool(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Health, "_readmit", lambda self, role, now_s: None)


def the_failures_of_the_pool_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    def fails(account: Account, rest: Iterable[Account]) -> bool:
        return account.bad >= outliers.FAILURES

    patch.setattr(outliers, "fails", fails)


def the_second_try_goes_anywhere(patch: pytest.MonkeyPatch) -> None:
    real = Health.failed

    def failed(self: Health, work: Any, *args: Any) -> None:
        real(self, work, *args)
        work.request.avoid = ()

    patch.setattr(Health, "failed", failed)


def a_failure_counts_at_once(patch: pytest.MonkeyPatch) -> None:
    """Nobody asks whether another worker serves the request."""
    patch.setattr(Health, "_clear", lambda self, request: True)

    def convict(self: Health, request: LiveRequest, witnesses: Any) -> None:
        for charge in request.charges:
            if not charge.judged:
                charge.judged = self._convicted = True
                for name in charge.workers:
                    self._accounts[name].failed(charge.weight)

    patch.setattr(Health, "_convict", convict)
    real = Health._charge

    def charged(self: Health, request: LiveRequest, *args: Any) -> None:
        real(self, request, *args)
        convict(self, request, ())

    patch.setattr(Health, "_charge", charged)


def a_request_that_fails_twice_counts_for_the_first_worker(patch: pytest.MonkeyPatch) -> None:
    """What is pending counts when the request has ended, however it ended."""
    real = Health.ended

    def ended(self: Health, request: LiveRequest, error: PdserveError | None) -> None:
        for charge in request.charges:
            charge.bind = 0
        self._convict(request, [])
        real(self, request, error)

    patch.setattr(Health, "ended", ended)
    absolved = Health._charge

    def charge(self: Health, request: LiveRequest, *args: Any) -> None:
        before = list(request.charges)
        absolved(self, request, *args)
        request.charges = before or request.charges

    patch.setattr(Health, "_charge", charge)


def each_absence_is_short(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(outliers, "away_s", lambda ejections: 30.0)


def a_failure_is_no_load(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Account, "handicap", lambda self, now_s: 0.0)


def any_two_failed_pairs_blame_their_common_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pairs, "at_fault", lambda self, worker: self.partners(worker) >= 2)


def pairs_are_blamed_and_never_their_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pairs, "at_fault", lambda self, worker: False)


KILLED: tuple[tuple[Mutant, Story], ...] = (
    (nobody_is_ejected, a_broken_worker_is_ejected_and_costs_nothing),
    (nobody_is_ejected, an_end_that_reads_from_nobody_is_left_alone),
    (more_than_half_is_ejected, half_of_the_pool_stays),
    (the_ejected_do_not_come_back_for_a_small_pool, a_pool_that_shrinks_still_serves),
    (the_failures_of_the_pool_are_not_compared, a_fault_that_all_share_ejects_nobody),
    (the_second_try_goes_anywhere, second_tries_wait_for_another_worker),
    (a_failure_counts_at_once, hostile_prompts_of_a_few_workers_eject_nobody),
    (a_request_that_fails_twice_counts_for_the_first_worker, hostile_prompts_of_a_few_workers_eject_nobody),
    (each_absence_is_short, a_worker_that_fails_again_stays_out_longer),
    (a_failure_is_no_load, a_recent_failure_is_load),
    (any_two_failed_pairs_blame_their_common_end, a_partition_of_the_pools_ejects_nobody),
    (pairs_are_blamed_and_never_their_ends, an_end_that_reads_from_nobody_is_left_alone),
)
STORIES = tuple(dict.fromkeys([story for _, story in KILLED] + [hostile_prompts_eject_nobody]))


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_each_story_holds(story: Story) -> None:
    story()


@pytest.mark.parametrize(("mutant", "story"), KILLED, ids=lambda one: one.__name__)
def test_each_mutant_is_noticed(mutant: Mutant, story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        story()
