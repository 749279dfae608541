"""What the router does about each loss it can see, one story a fault. Tokens are checked against the oracle by the stage."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    KvCorrupt,
    KvRotted,
    LeaseGone,
    NumericalError,
    Overloaded,
    ReplicaLost,
    TransferFailed,
    Unavailable,
    UnknownWorker,
)
from pdserve.core.ids import Handle, RequestId, WorkerId
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role
from router.core import events as ev

from ..core_peers import Outcome, Peer, Stage, row


def pools(prefill: int = 2, decode: int = 2, **config: object) -> Stage:
    stage = Stage(**config)
    for n in range(prefill):
        stage.join(f"prefill-{n}", Role.PREFILL)
    for n in range(decode):
        stage.join(f"decode-{n}", Role.DECODE)
    return stage


def sent(stage: Stage, kind: type) -> list:
    return [e for e in stage.effects if isinstance(e, kind)]


def busy(stage: Stage, role: Role) -> Peer:
    """The worker of this role that holds the only request."""
    (peer,) = [p for p in stage.peers.values() if p.hello.role is role and p.jobs]
    return peer


def binding(stage: Stage) -> None:
    """Bind was sent and not answered."""


def prefill_sent(stage: Stage) -> None:
    stage.deliver(busy(stage, Role.DECODE))


def prefilling(stage: Stage) -> None:
    """Attached; no token yet."""
    prefill_sent(stage)
    stage.deliver(busy(stage, Role.PREFILL))


def in_handoff(stage: Stage) -> None:
    """Token 0 is out, KV is not committed."""
    prefilling(stage)
    prefill = busy(stage, Role.PREFILL)
    prefill.progress()
    stage.deliver(prefill)


def decoding(stage: Stage) -> None:
    """Three tokens are out."""
    in_handoff(stage)
    decode = busy(stage, Role.DECODE)
    for _ in range(3):
        decode.progress()
    stage.deliver(decode, 3)


def committed_early(stage: Stage) -> None:
    """Decode has committed and sent tokens; token 0 has not been heard."""
    prefilling(stage)
    decode = busy(stage, Role.DECODE)
    for _ in range(3):
        decode.progress()
    stage.deliver(decode, 3)


def finish(stage: Stage, outcome: Outcome, *, attempts: int, binds: int, tokens: int = 6) -> None:
    stage.run()
    assert outcome.ended == ["done"]
    assert outcome.emitted == list(range(tokens))
    assert outcome.report is not None
    assert (outcome.report.attempts, outcome.report.binds) == (attempts, binds)
    stage.assert_empty()


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


@pytest.mark.parametrize("placement", [Placement.DISAGGREGATED, Placement.COLOCATED])
def test_a_decode_worker_lost_in_mid_stream_is_replayed_from_what_the_client_has(placement: Placement) -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=6, placement=placement)
    for _ in range(30):
        for peer in list(stage.peers.values()):
            if len(outcome.emitted) < 3:
                peer.progress()
                stage.deliver(peer)
    assert len(outcome.emitted) == 3
    stage.leave(busy(stage, Role.DECODE))
    replay = sent(stage, ev.SendBind)[-1]
    assert (replay.work.resumed, replay.work.spec.prompt_ids) == ((0, 1, 2), (0, 1, 2, 3))
    finish(stage, outcome, attempts=2, binds=2)


def test_tokens_of_a_dead_bind_are_dropped_at_the_door() -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=6)
    in_handoff(stage)
    lost = busy(stage, Role.DECODE)
    (handle,) = lost.jobs
    stage.leave(lost)
    assert stage.tell(ev.StepRows(lost.link, [row(handle, 1, ids=[99])])) == []
    assert stage.tell(ev.KvCommitted(lost.link, handle, 1, 0.1, 0.1, 0.1)) == []
    finish(stage, outcome, attempts=1, binds=2)


def test_tokens_held_for_a_lost_attempt_are_drawn_again() -> None:
    """Decode sent token 1 before token 0 was heard; with the prefill worker their attempt dies."""
    stage = pools()
    outcome = stage.submit("r", max_tokens=6)
    prefilling(stage)
    decode = busy(stage, Role.DECODE)
    (handle,) = decode.jobs
    stage.tell(ev.KvCommitted(decode.link, handle, 1, 0.1, 0.1, 0.1))
    stage.tell(ev.StepRows(decode.link, [row(handle, 1, ids=[99])]))
    assert outcome.emitted == []
    stage.leave(busy(stage, Role.PREFILL))
    assert sent(stage, ev.SendBind)[-1].work.resumed == ()
    finish(stage, outcome, attempts=2, binds=2)


def test_decode_may_not_draw_the_token_that_prefill_draws_in_a_replay() -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=6)
    in_handoff(stage)
    stage.leave(stage.peers[sent(stage, ev.SendPrefill)[0].link])
    prefilling(stage)
    decode = busy(stage, Role.DECODE)
    (handle,) = decode.jobs
    stage.tell(ev.KvCommitted(decode.link, handle, 1, 0.1, 0.1, 0.1))
    stage.tell(ev.StepRows(decode.link, [row(handle, 1)]))
    assert outcome.ended == ["internal_bug"]
    stage.assert_empty()


def test_a_message_that_comes_twice_on_a_live_handle_fails_its_request_alone() -> None:
    for twice in (ev.Reserved, lambda link, handle: ev.NoRoom(link, handle, 1)):
        stage = pools()
        outcome, other = stage.submit("r", max_tokens=6), stage.submit("other", max_tokens=6)
        decode = stage.peers[sent(stage, ev.SendBind)[0].link]
        stage.deliver(decode)
        stage.tell(twice(decode.link, min(decode.jobs)))
        assert outcome.ended == ["internal_bug"]
        stage.run()
        assert other.ended == ["done"]
        stage.assert_empty()


@pytest.mark.parametrize(
    "error",
    [LeaseGone("gone"), KvRotted("rotted"), KvCorrupt("flipped"), TransferFailed("no route"), ReplicaLost("lender lost")],
)
@pytest.mark.parametrize("reach", [prefilling, in_handoff])
def test_a_failed_pull_is_tried_again_on_another_pair(error: Exception, reach: Callable[[Stage], None]) -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=6)
    reach(stage)
    decode = busy(stage, Role.DECODE)
    (handle,) = decode.jobs
    lender = sent(stage, ev.SendPrefill)[0].link
    del decode.jobs[handle]
    pair_failed = not isinstance(error, LeaseGone | KvRotted)
    stage.tell(ev.RequestFailed(decode.link, handle, error, pair_failed))  # type: ignore[arg-type]
    finish(stage, outcome, attempts=2, binds=2)
    again = (sent(stage, ev.SendPrefill)[-1].link, sent(stage, ev.SendBind)[-1].link)
    aside = list(stage.core.pairs.set_aside(now_s=stage.now_s))
    assert len(aside) == (0 if isinstance(error, LeaseGone | KvRotted) else 1), "only what lies between the two is the pair's"
    assert not aside or again != (lender, decode.link)


def test_past_its_attempts_a_request_fails_with_the_last_loss() -> None:
    stage = pools(prefill=0, decode=1, max_attempts=3)
    outcome = stage.submit("r", max_tokens=6)
    decode = next(iter(stage.peers.values()))
    for n in range(3):
        (handle,) = decode.jobs
        del decode.jobs[handle]
        stage.tell(ev.RequestFailed(decode.link, handle, TransferFailed(f"fault {n}")))
    assert outcome.ended == ["transfer_failed"]
    assert "after 3 attempts" in str(outcome.error)
    assert "fault 2" in str(outcome.error)
    assert outcome.report is not None
    assert (outcome.report.attempts, outcome.report.binds) == (3, 3)
    stage.assert_empty()


def test_a_dead_workers_batch_is_retried_only_as_far_as_the_bucket_goes() -> None:
    stage = Stage(retry_burst=2, retry_share=0.0)
    decode = stage.join("decode-0", Role.DECODE)
    outcomes = [stage.submit(f"r{n}", prompt_len=4, max_tokens=6) for n in range(4)]
    stage.deliver(decode, 4)
    stage.leave(decode)
    assert [o.ended for o in outcomes] == [[], [], ["replica_lost"], ["replica_lost"]]
    assert "retries are used up" in str(outcomes[3].error)
    stage.join("decode-0", Role.DECODE)
    stage.run()
    assert [o.ended for o in outcomes[:2]] == [["done"], ["done"]]
    stage.assert_empty()


def test_replays_go_first_among_equals_and_do_not_fill_the_queue_for_others() -> None:
    stage = Stage(max_queued_requests=1)
    decode = stage.join("decode-0", Role.DECODE, max_num_seqs=2)
    for name in ("a", "b"):
        stage.submit(name, max_tokens=6)
    stage.deliver(decode, 2)
    stage.submit("c", max_tokens=6)
    keeps_alive = stage.join("decode-1", Role.DECODE, max_num_seqs=1)
    stage.deliver(keeps_alive)
    stage.submit("d", max_tokens=6)
    stage.leave(decode)
    assert len(stage.core.waiting) == 3
    with pytest.raises(Overloaded):
        stage.submit("e", max_tokens=6)
    stage.run()
    assert [stage.request_of(e) for e in sent(stage, ev.SendBind)][3:] == ["a", "b", "d"]
    stage.assert_empty()


def test_a_replay_goes_before_an_older_request_that_has_not_begun() -> None:
    """The older one was refused room, the younger one had it and lost its worker in mid-stream."""
    stage = pools(prefill=0, decode=1)
    (decode,) = stage.peers.values()
    decode.refuse = 1
    stage.submit("old", max_tokens=6)
    stage.submit("young", max_tokens=6)
    stage.deliver(decode, 2)
    stage.leave(decode)
    stage.join("decode-0", Role.DECODE)
    assert [stage.request_of(e) for e in sent(stage, ev.SendBind)] == ["old", "young", "young", "old"]
    stage.run()
    stage.assert_empty()


def test_a_replay_that_no_worker_can_take_holds_nobody_up_and_ends_in_time() -> None:
    """A request that insists on a handoff loses the only prefill worker; who is colocated goes on behind it."""
    stage = pools(prefill=1, decode=1, recovery_wait_s=4.0)
    stuck = stage.submit("stuck", max_tokens=6, placement=Placement.DISAGGREGATED)
    prefilling(stage)
    stage.leave(busy(stage, Role.PREFILL))
    other = stage.submit("other", max_tokens=6)
    stage.run()
    assert (stuck.ended, other.ended) == ([], ["done"])
    with pytest.raises(Unavailable):
        stage.submit("new", placement=Placement.DISAGGREGATED)
    stage.now_s += 4.1
    stage.tell(ev.Tick())
    assert stuck.ended == ["unavailable"]
    stage.assert_empty()


def test_a_loss_after_the_deadline_ends_as_deadline_exceeded() -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=6, deadline_s=1.0)
    decoding(stage)
    stage.now_s += 1.5
    stage.leave(busy(stage, Role.DECODE))
    assert outcome.ended == ["deadline_exceeded"]
    stage.assert_empty()


def test_a_client_that_leaves_while_its_replay_waits_is_gone() -> None:
    stage = pools(decode=1)
    outcome = stage.submit("r", max_tokens=6)
    decoding(stage)
    stage.leave(busy(stage, Role.DECODE))
    stage.tell(ev.ClientGone(next(iter(stage.outcomes))))
    assert outcome.ended == ["cancelled"]
    stage.assert_empty()


def test_a_worker_that_turns_requests_away_is_not_asked_again_before_its_heartbeat() -> None:
    """It drains, and the router has not heard so yet. Else its emptiness would draw every retry."""
    stage = pools(prefill=0)
    refusing = next(iter(stage.peers.values()))
    refusing.draining = True
    outcomes = [stage.submit(f"r{n}", max_tokens=6) for n in range(6)]
    stage.run()
    assert [o.ended for o in outcomes] == [["done"]] * 6
    assert max(o.report.attempts for o in outcomes if o.report) == 2
    stage.assert_empty()


def test_a_drained_worker_keeps_what_it_has_and_is_told_again_after_a_broken_link() -> None:
    stage = pools(prefill=0, decode=1)
    outcome = stage.submit("r", max_tokens=6)
    (peer,) = stage.peers.values()
    stage.deliver(peer)
    stage.tell(ev.DrainAsked(peer.hello.worker_id))
    with pytest.raises(Unavailable):
        stage.submit("new")
    stage.run()
    assert outcome.ended == ["done"]
    stage.leave(peer)
    again = stage.join("decode-0", Role.DECODE, incarnation=peer.hello.incarnation)
    assert [e.link for e in sent(stage, ev.SendDrain)] == [peer.link, again.link]
    stage.leave(again)
    stage.join("decode-0", Role.DECODE)
    assert stage.submit("after").ended == []
    stage.run()
    stage.assert_empty()


def test_every_heartbeat_is_answered() -> None:
    stage = pools()
    for peer in list(stage.peers.values()):
        stage.heartbeat(peer)
    assert [e.link for e in sent(stage, ev.SendAlive)] == list(stage.peers)
    assert stage.tell(ev.HeartbeatSeen(ev.LinkId(99), stage.core.registry.of_role(Role.DECODE)[0].load)) == []


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
    stage = pools(max_attempts=1)
    outcome = stage.submit("r", max_tokens=6)
    in_handoff(stage)
    for peer in [p for p in list(stage.peers.values()) if p.hello.role is Role.DECODE]:
        stage.leave(peer)
    assert outcome.ended == ["replica_lost"]
    assert outcome.report is not None
    assert (outcome.report.attempts, outcome.report.binds) == (1, 2)
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


def fail_for_want_of_numbers(stage: Stage) -> None:
    peer = busy(stage, Role.DECODE)
    (handle,) = peer.jobs
    del peer.jobs[handle]
    stage.tell(ev.RequestFailed(peer.link, handle, NumericalError("no numbers")))


def test_logits_that_are_no_numbers_are_computed_once_more_and_not_a_third_time() -> None:
    """A worker's memory may be the reason, or a block that was shared; the second time it is the model or the prompt."""
    stage = pools()
    outcome = stage.submit("r", max_tokens=8)
    decoding(stage)
    fail_for_want_of_numbers(stage)
    assert not outcome.ended
    assert not len(stage.core.pairs), "KV came through"
    decoding(stage)
    emitted = list(outcome.emitted)
    fail_for_want_of_numbers(stage)
    assert outcome.ended == ["numerical_error"]
    assert outcome.emitted == emitted
    assert outcome.error is not None
    assert "after 2 attempts (the same failure came twice): no numbers" in outcome.error.message
    assert outcome.report is not None
    assert outcome.report.retry_reasons == ("numerical_error",)
    stage.run()
    stage.assert_empty()


def test_logits_that_are_numbers_at_the_second_try_cost_a_client_nothing() -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=8)
    decoding(stage)
    fail_for_want_of_numbers(stage)
    stage.run()
    assert outcome.ended == ["done"]
    assert outcome.emitted == list(range(8))
    stage.assert_empty()


OWN_DEADLINE = DeadlineExceeded("lease 1/1: 16 of 64 tokens after 2.0 s")
STALLED = TransferFailed("lease 1/1: 16 of 64 tokens, no progress for 60.0 s")


@pytest.mark.parametrize("reach", [prefilling, in_handoff])
def test_the_deadline_of_a_request_does_not_set_its_pair_aside(reach: Callable[[Stage], None]) -> None:
    """The decode worker says so a moment before the router's tick, as it usually does."""
    stage = pools()
    outcome = stage.submit("r", max_tokens=6, deadline_s=2.0)
    reach(stage)
    decode = busy(stage, Role.DECODE)
    (handle,) = decode.jobs
    del decode.jobs[handle]
    stage.now_s = 2.01
    stage.tell(ev.RequestFailed(decode.link, handle, OWN_DEADLINE))
    assert outcome.ended == ["deadline_exceeded"]
    assert not len(stage.core.pairs)
    stage.assert_empty()


def test_a_worker_whose_clock_is_fast_ends_no_request_before_its_deadline() -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=6, deadline_s=20.0)
    prefilling(stage)
    decode = busy(stage, Role.DECODE)
    (handle,) = decode.jobs
    del decode.jobs[handle]
    stage.tell(ev.RequestFailed(decode.link, handle, OWN_DEADLINE))
    finish(stage, outcome, attempts=2, binds=2)
    assert not len(stage.core.pairs)


def test_a_prompt_that_its_lender_does_not_go_on_with_does_not_set_the_pair_aside() -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=6)
    prefilling(stage)
    decode = busy(stage, Role.DECODE)
    (handle,) = decode.jobs
    del decode.jobs[handle]
    stage.tell(ev.RequestFailed(decode.link, handle, STALLED, pair_failed=False))
    finish(stage, outcome, attempts=2, binds=2)
    assert not len(stage.core.pairs)


def test_a_cancelled_request_does_not_set_its_pair_aside() -> None:
    stage = pools()
    outcome = stage.submit("r", max_tokens=6)
    in_handoff(stage)
    decode = busy(stage, Role.DECODE)
    (handle,) = decode.jobs
    stage.tell(ev.ClientGone(RequestId("r")))
    stage.tell(ev.RequestFailed(decode.link, handle, TransferFailed("no route"), pair_failed=True))
    assert outcome.ended == ["cancelled"]
    assert not len(stage.core.pairs)
    stage.assert_empty()


def test_a_budget_goes_to_the_worker_that_is_named_and_within_its_limits() -> None:
    stage = pools(prefill=1, decode=1)
    peer = next(p for p in stage.peers.values() if p.hello.role is Role.DECODE)
    stage.tell(ev.BudgetAsked(peer.hello.worker_id, 16))
    least = peer.hello.block_size + peer.hello.max_num_seqs - 1  # a block of a prompt beside all others that decode
    stage.tell(ev.BudgetAsked(peer.hello.worker_id, least))
    with pytest.raises(InvalidRequest, match=f"takes from {least} to {peer.hello.max_num_batched_tokens}"):
        stage.tell(ev.BudgetAsked(peer.hello.worker_id, least - 1))
    with pytest.raises(UnknownWorker, match="worker_id: worker 'moon' is not linked"):
        stage.tell(ev.BudgetAsked(WorkerId("moon"), 16))
    silent = stage.join("decode-9", Role.DECODE, max_num_batched_tokens=0)
    with pytest.raises(InvalidRequest, match="max_num_batched_tokens: 16 is out of range; worker 'decode-9' takes nothing"):
        stage.tell(ev.BudgetAsked(silent.hello.worker_id, 16))
    small = stage.join("decode-8", Role.DECODE, max_num_batched_tokens=2)  # less than a block: it can only have what it has
    stage.tell(ev.BudgetAsked(small.hello.worker_id, 2))
    assert [(e.link, e.max_num_batched_tokens) for e in sent(stage, ev.SendBudget)] == [
        (peer.link, 16),
        (peer.link, least),
        (small.link, 2),
    ]
