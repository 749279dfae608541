"""The router goes on when a worker is lost before the stream runs: it replaces, rebinds or retries, one story a loss."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.core.ids import Handle
from pdserve.core.worker import Role
from router.core import events as ev
from tests.router.core.recovery.stages import (
    busy,
    committed_early,
    decoding,
    finish,
    in_handoff,
    pools,
    prefill_sent,
    prefilling,
    sent,
)
from tests.router.core_peers import Stage


@pytest.mark.parametrize("reach", [prefill_sent, prefilling, in_handoff, committed_early])
def test_a_lost_prefill_worker_is_replaced_and_the_stream_goes_on(reach: Callable[[Stage], None]) -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=6)
    reach(stage)
    lost = next(e.link for e in sent(stage, ev.SendPrefill))
    seen = len(outcome.emitted)
    stage.leave(stage.peers[lost])
    replay = sent(stage, ev.SendBind)[-1].work
    assert (replay.resumed, replay.spec.prompt_ids) == (tuple(range(seen)), (0, 1, 2, 3))
    assert stage.placed[replay.handle] == ("r", 2)
    assert replay.spec.sampling.max_tokens == 6
    finish(stage, outcome, attempts=2, binds=2)
    assert sent(stage, ev.SendPrefill)[-1].link != lost


def test_a_prefill_worker_lost_after_the_commit_is_not_missed() -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=6)
    decoding(stage)
    stage.leave(stage.peers[sent(stage, ev.SendPrefill)[0].link])
    finish(stage, outcome, attempts=1, binds=1)


def test_a_decode_worker_lost_before_it_reserved_costs_no_attempt() -> None:
    stage = pools(max_attempts=1, retry_burst=0, retry_share=0.0)
    outcome = stage.submit("r", max_tokens=6)
    stage.leave(busy(stage, Role.DECODE))
    finish(stage, outcome, attempts=1, binds=2)


@pytest.mark.parametrize("reach", [prefill_sent, prefilling, in_handoff])
def test_a_decode_worker_lost_in_the_handoff_is_rebound_to_the_same_lease(reach: Callable[[Stage], None]) -> None:
    stage = pools(max_attempts=1, retry_burst=0, retry_share=0.0)
    outcome = stage.submit("r", max_tokens=6)
    reach(stage)
    lost = busy(stage, Role.DECODE)
    prefill = busy(stage, Role.PREFILL) if reach is not in_handoff else None
    stage.leave(lost)
    first, second = sent(stage, ev.SendBind)
    assert second.link != lost.link
    assert stage.placed[first.work.handle] == stage.placed[second.work.handle] == ("r", 1)
    assert second.work.resumed == ()
    assert stage.core.ledger.charged(lost.link) == 0
    assert stage.core.ledger.charged(second.link) > 0
    assert prefill is None or prefill.jobs, "the prefill goes on"
    finish(stage, outcome, attempts=1, binds=2)
    assert len(sent(stage, ev.SendPrefill)) == 1
    assert len({(e.lease_id, e.ticket) for e in sent(stage, ev.SendAttach)}) == 1


def test_a_rebind_attaches_when_the_prefill_starts_after_it() -> None:
    """(1) Decode is lost before the lease is known. (2) Its successor reserves. (3) Prefill starts: now it is attached."""
    stage = pools()
    outcome = stage.submit("r", max_tokens=6)
    prefill_sent(stage)
    stage.leave(busy(stage, Role.DECODE))
    stage.deliver(busy(stage, Role.DECODE))
    assert not sent(stage, ev.SendAttach)
    stage.deliver(busy(stage, Role.PREFILL))
    assert len(sent(stage, ev.SendAttach)) == 1
    finish(stage, outcome, attempts=1, binds=2)


def test_a_rebind_attaches_when_its_worker_reserves_after_the_prefill_started() -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=6)
    prefill_sent(stage)
    stage.leave(busy(stage, Role.DECODE))
    stage.deliver(busy(stage, Role.PREFILL))
    assert not sent(stage, ev.SendAttach)
    stage.deliver(busy(stage, Role.DECODE))
    assert len(sent(stage, ev.SendAttach)) == 1
    finish(stage, outcome, attempts=1, binds=2)


def test_a_rebind_avoids_a_worker_that_the_lenders_kv_does_not_reach() -> None:
    stage = pools(prefill=1, decode=2)
    outcome = stage.submit("r", max_tokens=6)
    prefilling(stage)
    lost = busy(stage, Role.DECODE)
    other = next(p for p in stage.peers.values() if p.hello.role is Role.DECODE and p is not lost)
    lender = busy(stage, Role.PREFILL)
    stage.core.pairs.failed(lender.hello, other.hello, "no route", now_s=stage.now_s)
    stage.replayable = False
    stage.leave(lost)
    assert stage.placed[sent(stage, ev.SendBind)[-1].work.handle] == ("r", 2)
    finish(stage, outcome, attempts=2, binds=2)
    assert outcome.report is not None
    assert outcome.report.placement_reason == "pairs_set_aside"


@pytest.mark.parametrize("why", ["nobody else", "refused", "committed"])
def test_a_rebind_that_cannot_be_becomes_a_retry_and_the_lease_is_given_back(why: str) -> None:
    stage = pools(decode=1 if why == "nobody else" else 2)
    outcome = stage.submit("r", max_tokens=6)
    (committed_early if why == "committed" else prefilling)(stage)
    lost, prefill = busy(stage, Role.DECODE), busy(stage, Role.PREFILL)
    (lease_handle,) = prefill.jobs
    for peer in stage.peers.values():
        peer.refuse = int(why == "refused" and peer.hello.role is Role.DECODE)
    stage.leave(lost)
    for peer in list(stage.peers.values()):
        if peer.hello.role is Role.DECODE:
            stage.deliver(peer)
            stage.heartbeat(peer)
    assert ev.SendCancel(prefill.link, lease_handle) in stage.effects
    assert outcome.emitted == []
    if why == "nobody else":
        stage.join("decode-0", Role.DECODE)
    finish(stage, outcome, attempts=2, binds=3 if why == "refused" else 2)


def test_a_rebind_never_goes_to_a_full_or_draining_worker() -> None:
    stage = pools(decode=3, prefill=1)
    outcome = stage.submit("r", max_tokens=6)
    prefilling(stage)
    lost = busy(stage, Role.DECODE)
    draining, roomy = [p for p in stage.peers.values() if p.hello.role is Role.DECODE and p is not lost]
    stage.tell(ev.DrainAsked(draining.hello.worker_id))
    stage.leave(lost)
    assert sent(stage, ev.SendBind)[-1].link == roomy.link
    finish(stage, outcome, attempts=1, binds=2)


def test_the_timeline_of_a_report_is_that_of_the_last_attempt() -> None:
    """Every message takes a while: the phases come in their order, but for the two that two links report."""
    stage = pools()
    outcome = stage.submit("r", max_tokens=3)
    in_handoff(stage)
    stage.leave(busy(stage, Role.DECODE))
    stage.leave(next(p for p in stage.peers.values() if p.link == sent(stage, ev.SendPrefill)[0].link))
    for _ in range(20):
        for peer in list(stage.peers.values()):
            peer.progress()
            stage.now_s += 0.1
            stage.deliver(peer)
    report = outcome.report
    assert report is not None
    for middle in (report.prefill_end_s, report.kv_committed_s):
        assert 0 < report.prefill_start_s < middle <= report.first_decode_s <= report.total_s
    assert (report.attempts, report.ttft_s, report.queue_s) == (2, 0.0, 0.0)
    stage.assert_empty()


def test_a_failed_request_reports_its_attempts_and_binds() -> None:
    stage = pools(recovery_wait_s=2.0)
    outcome = stage.submit("r", max_tokens=6)
    in_handoff(stage)
    for peer in [p for p in list(stage.peers.values()) if p.hello.role is Role.DECODE]:
        stage.leave(peer)
    stage.tell(ev.Tick())
    stage.now_s = 2.5
    for peer in stage.peers.values():
        stage.heartbeat(peer)
    stage.tell(ev.Tick())
    assert outcome.ended == ["unavailable"]
    assert outcome.report is not None
    assert (outcome.report.attempts, outcome.report.binds) == (2, 2)
    assert outcome.report.output_tokens == 1
    stage.assert_empty()


def test_a_stale_handle_of_an_earlier_attempt_changes_nothing() -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=6)
    in_handoff(stage)
    decode = busy(stage, Role.DECODE)
    (handle,) = decode.jobs
    stage.leave(stage.peers[sent(stage, ev.SendPrefill)[0].link])
    assert Handle(handle) not in decode.jobs, "cancelled"
    for event in (ev.Reserved(decode.link, handle), ev.KvCommitted(decode.link, handle, 1, 0.1, 0.1, 0.1)):
        assert stage.tell(event) == []
    finish(stage, outcome, attempts=2, binds=2)


@pytest.mark.parametrize(("told", "known"), [(3, 3), (99, 4), (None, None)])
def test_a_replay_after_the_first_token_does_not_change_the_cached_tokens(told: int | None, known: int | None) -> None:
    """No more tokens are cached than the prompt has, whatever a worker says."""
    stage = pools()
    for peer in stage.peers.values():
        peer.cached_tokens = told
    outcome = stage.submit("r", max_tokens=6)
    decoding(stage)
    for peer in stage.peers.values():
        peer.cached_tokens = 1
    stage.leave(busy(stage, Role.DECODE))
    finish(stage, outcome, attempts=2, binds=2)
    assert outcome.report is not None
    assert outcome.report.cached_tokens == known


def test_an_attempt_before_the_first_token_tells_the_cached_tokens_anew() -> None:
    stage = pools()
    for peer in stage.peers.values():
        peer.cached_tokens = 3
    outcome = stage.submit("r", max_tokens=6)
    prefilling(stage)
    for peer in stage.peers.values():
        peer.cached_tokens = 1
    stage.leave(busy(stage, Role.PREFILL))
    finish(stage, outcome, attempts=2, binds=2)
    assert outcome.report is not None
    assert outcome.report.cached_tokens == 1
