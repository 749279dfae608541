"""The router replays a stream whose decode worker is lost, from what the client has. Tokens are checked against the oracle."""

from __future__ import annotations

import pytest

from pdserve.core.errors import Overloaded, Unavailable
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role
from router.core import events as ev
from tests.router.core.recovery.stages import busy, decoding, finish, in_handoff, pools, prefilling, sent
from tests.router.core_peers import Stage, row


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
