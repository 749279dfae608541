"""The router tries again what a worker reports as failed, within the attempts, and blames a pair only for its own fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.core.errors import DeadlineExceeded, KvCorrupt, KvRotted, LeaseGone, NumericalError, ReplicaLost, TransferFailed
from pdserve.core.ids import RequestId
from pdserve.core.worker import Role
from router.core import events as ev
from tests.router.core.recovery.stages import busy, decoding, finish, in_handoff, pools, prefill_sent, prefilling, sent
from tests.router.core_peers import Stage


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


def test_failures_of_requests_are_retried_only_as_far_as_the_bucket_goes() -> None:
    stage = Stage(retry_burst=2, retry_share=0.0)
    decode = stage.join("decode-0", Role.DECODE)
    outcomes = [stage.submit(f"r{n}", prompt_len=4, max_tokens=6) for n in range(4)]
    stage.deliver(decode, 4)
    for handle in list(decode.jobs):
        del decode.jobs[handle]
        stage.tell(ev.RequestFailed(decode.link, handle, TransferFailed("no route")))
    assert [o.ended for o in outcomes] == [[], [], ["transfer_failed"], ["transfer_failed"]]
    assert "retries are used up" in str(outcomes[3].error)
    stage.run()
    assert [o.ended for o in outcomes[:2]] == [["done"], ["done"]]
    stage.assert_empty()


def test_a_peers_word_that_a_worker_is_lost_costs_attempts_but_no_retry_of_the_cluster() -> None:
    """A decode worker may say so for ever, so the attempts of the request bound it."""
    stage = Stage(max_attempts=3, retry_burst=0, retry_share=0.0)
    decode = stage.join("decode-0", Role.DECODE)
    outcome = stage.submit("r", prompt_len=4, max_tokens=6)
    for _ in range(3):
        stage.deliver(decode)
        (handle,) = decode.jobs
        del decode.jobs[handle]
        stage.tell(ev.RequestFailed(decode.link, handle, ReplicaLost("the lender is lost")))
    assert outcome.ended == ["replica_lost"]
    assert "after 3 attempts (no more are allowed for one request)" in str(outcome.error)
    stage.assert_empty()


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


@pytest.mark.parametrize("reach", [prefilling, prefill_sent])
def test_a_lender_that_failed_is_told_when_its_lease_may_end(reach: Callable[[Stage], None]) -> None:
    """The lender keeps the lease until the router has heard why, so that the reader cannot tell of its loss before. It may have
    failed between the grant of a lease and its word of it."""
    stage = pools()
    outcome = stage.submit("r", max_tokens=8)
    reach(stage)
    prefill = busy(stage, Role.PREFILL)
    (handle,) = prefill.jobs
    stage.tell(ev.RequestFailed(prefill.link, handle, NumericalError("no numbers")))
    assert stage.effects.count(ev.SendCancel(prefill.link, handle)) == 1
    assert not prefill.jobs
    stage.run()
    assert outcome.ended == ["done"]
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
