"""Readiness: who is probed with whom, what it takes to be ready, and that no client sees any of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from pdserve.core.errors import InternalBug, Unavailable
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.probes import DEADLINE_S

from ..core_peers import Peer, Stage


def reason(stage: Stage, peer: Peer) -> str:
    worker = stage.core.registry.get(peer.link)
    assert worker is not None
    return stage.core.placer.not_ready_reason(worker, now_s=stage.now_s)


def probing(**config: object) -> Stage:
    return Stage(probe_workers=True, **config)


def later(stage: Stage, seconds: float) -> None:
    """Time passes in steps that no worker is found silent in."""
    for _ in range(round(seconds * 2)):
        stage.now_s += 0.5
        for peer in list(stage.peers.values()):
            stage.heartbeat(peer)
        stage.tell(ev.Tick())
        stage.run()


def test_a_pair_is_ready_when_decode_has_drawn_a_token_from_pulled_kv() -> None:
    """(1) The first to join waits for the other. (2) Bind, prefill, attach, commit: still nobody is ready. (3) A token is."""
    stage = probing()
    prefill = stage.join("prefill-0", Role.PREFILL)
    assert "no decode worker" in reason(stage, prefill)
    decode = stage.join("decode-0", Role.DECODE)
    stage.deliver(decode)
    stage.deliver(prefill)
    prefill.progress()
    stage.deliver(prefill)
    decode.progress()
    stage.deliver(decode)
    assert reason(stage, decode) == "waiting for a KV round trip"
    decode.progress()
    stage.deliver(decode)
    assert (reason(stage, prefill), reason(stage, decode)) == ("", "")
    (bind,) = [e for e in stage.effects if isinstance(e, ev.SendBind)]
    assert (len(bind.work.spec.prompt_ids), bind.work.spec.sampling.max_tokens, bind.work.spec.sampling.ignore_eos) == (
        5,
        2,
        True,
    )
    assert not [e for e in stage.effects if isinstance(e, ev.EmitDelta | ev.EmitDone | ev.EmitFailed)]
    stage.assert_empty()


def test_a_decode_worker_alone_is_tried_with_itself_and_a_prefill_worker_that_joins_with_it() -> None:
    stage = probing()
    decode = stage.join("decode-0", Role.DECODE)
    stage.run()
    assert reason(stage, decode) == ""
    assert [e.local_prefill for e in stage.effects if isinstance(e, ev.SendBind)] == [True]
    prefill = stage.join("prefill-0", Role.PREFILL)
    assert reason(stage, prefill) == "waiting for a KV round trip"
    stage.run()
    assert reason(stage, prefill) == ""
    stage.assert_empty()


def test_requests_wait_for_workers_that_are_being_probed_and_go_to_no_other() -> None:
    stage = probing()
    with pytest.raises(Unavailable):
        stage.submit("nobody is linked")
    decode = stage.join("decode-0", Role.DECODE)
    outcome = stage.submit("r")
    assert [stage.request_of(e) for e in stage.effects if isinstance(e, ev.SendBind)] != ["r"]
    assert stage.core.num_requests == 1, "the probe is nobody's request"
    worker = stage.core.registry.get(decode.link)
    assert worker is not None
    assert (len(worker.work), worker.requests_placed) == (1, 0)
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


def test_a_prefill_worker_whose_kv_reaches_nobody_says_so_and_is_tried_again() -> None:
    stage = probing()
    decode = stage.join("decode-0", Role.DECODE)
    stage.run()
    prefill = stage.join("prefill-0", Role.PREFILL)
    decode.unreadable.add(prefill.hello.incarnation)
    stage.run()
    assert reason(stage, prefill) == "KV round trip with decode-0 failed: no route"
    assert reason(stage, decode) == "", "it still serves colocated"
    later(stage, 20.0)
    assert "no route" in reason(stage, prefill)
    decode.unreadable.clear()
    later(stage, 60.0)
    assert reason(stage, prefill) == ""
    stage.assert_empty()


def test_a_decode_worker_cut_off_from_all_prefill_workers_becomes_ready_by_itself() -> None:
    stage = probing()
    prefill = stage.join("prefill-0", Role.PREFILL)
    decode = stage.join("decode-0", Role.DECODE)
    decode.unreadable.add(prefill.hello.incarnation)
    stage.run()
    assert "no route" in reason(stage, decode)
    later(stage, 1.0)
    assert reason(stage, decode) == ""
    assert reason(stage, prefill) != ""
    stage.assert_empty()


def test_after_a_failure_the_next_peer_is_tried() -> None:
    stage = probing()
    decodes = [stage.join(f"decode-{n}", Role.DECODE) for n in range(2)]
    stage.run()
    prefill = stage.join("prefill-0", Role.PREFILL)
    decodes[0].unreadable.add(prefill.hello.incarnation)
    stage.run()
    later(stage, 1.0)
    assert reason(stage, prefill) == ""
    (aside,) = stage.core.pairs.set_aside(now_s=stage.now_s)
    assert (aside.prefill.worker_id, aside.decode.worker_id) == ("prefill-0", "decode-0")
    stage.assert_empty()


def test_a_worker_that_answers_no_probe_never_serves() -> None:
    """It beats and reserves, and no token ever comes."""
    stage = probing()
    decode = stage.join("decode-0", Role.DECODE)
    stage.deliver(decode)
    decode.jobs.clear()
    for _ in range(int(DEADLINE_S) + 1):
        stage.now_s += 1.0
        stage.heartbeat(decode)
        stage.tell(ev.Tick())
    assert "KV round trip with itself failed: deadline_s" in reason(stage, decode)
    later(stage, 2.0)
    assert reason(stage, decode) == "", "it works now, and was tried again"
    stage.assert_empty()


def test_a_probe_that_is_lost_with_its_peer_is_made_again() -> None:
    stage = probing()
    prefill = stage.join("prefill-0", Role.PREFILL)
    decode = stage.join("decode-0", Role.DECODE)
    stage.deliver(decode)
    stage.leave(decode)
    assert "a peer that left failed" in reason(stage, prefill)
    stage.join("decode-0", Role.DECODE)
    stage.run()
    later(stage, 1.0)
    assert reason(stage, prefill) == ""
    assert not len(stage.core.pairs)
    stage.assert_empty()


def test_a_worker_that_dials_again_must_show_again_that_kv_passes() -> None:
    stage = probing()
    decode = stage.join("decode-0", Role.DECODE)
    stage.run()
    again = stage.join("decode-0", Role.DECODE, incarnation=decode.hello.incarnation)
    assert reason(stage, again) == "waiting for a KV round trip"
    stage.run()
    assert reason(stage, again) == ""
    stage.assert_empty()


def test_a_full_decode_worker_says_nothing_about_the_pair() -> None:
    stage = probing()
    decode = stage.join("decode-0", Role.DECODE)
    stage.run()
    decode.refuse = 1
    prefill = stage.join("prefill-0", Role.PREFILL)
    stage.run()
    assert "waiting for room on decode-0" in reason(stage, prefill)
    assert not len(stage.core.pairs)
    later(stage, 1.0)
    assert reason(stage, prefill) == ""
    stage.assert_empty()


def test_a_draining_worker_is_no_peer_and_is_not_probed() -> None:
    stage = probing()
    prefill = stage.join("prefill-0", Role.PREFILL)
    stage.tell(ev.DrainAsked(prefill.hello.worker_id))
    decode = stage.join("decode-0", Role.DECODE)
    stage.run()
    assert (reason(stage, prefill), reason(stage, decode)) == ("draining", "")
    assert not [e for e in stage.effects if isinstance(e, ev.SendPrefill)]
    stage.assert_empty()


def test_a_peer_that_begins_to_drain_is_sent_no_prefill() -> None:
    stage = probing()
    prefill = stage.join("prefill-0", Role.PREFILL)
    decode = stage.join("decode-0", Role.DECODE)
    stage.tell(ev.DrainAsked(prefill.hello.worker_id))
    stage.run()
    assert "leaving" in reason(stage, decode)
    later(stage, 1.0)
    assert reason(stage, decode) == ""
    stage.assert_empty()


def test_a_broken_protocol_fails_the_probe_alone() -> None:
    stage = probing()
    decode = stage.join("decode-0", Role.DECODE)
    (handle,) = decode.jobs
    del decode.jobs[handle]
    stage.tell(ev.RequestFailed(decode.link, handle, InternalBug("no engine")))
    assert "no engine" in reason(stage, decode)
    later(stage, 1.0)
    assert reason(stage, decode) == ""
    stage.assert_empty()


def test_a_probe_that_a_busy_worker_delays_says_nothing_about_the_pair() -> None:
    """(1) A pair is ready. (2) The prefill worker stops answering for longer than a probe lives: its engine is busy. (3) A
    decode worker that joins is not kept out: it is tried with itself. (4) No pair is set aside."""
    stage = probing()
    prefill, first = stage.join("prefill-0", Role.PREFILL), stage.join("decode-0", Role.DECODE)
    stage.run()
    second = stage.join("decode-1", Role.DECODE)
    for _ in range(int(DEADLINE_S) + 5):
        stage.now_s += 1.0
        for peer in (prefill, first, second):
            stage.heartbeat(peer)
        stage.deliver(second, 9)
        second.progress()
        stage.tell(ev.Tick())
    stage.deliver(second, 9)
    assert reason(stage, second) == ""
    assert not len(stage.core.pairs)
    stage.run()
    stage.assert_empty()


def saturated(stage: Stage, decode: Peer) -> Callable[[], None]:
    """A second under full load: clients fill each slot in the event that frees it, and more of them wait."""
    names = itertools.count()

    def second() -> None:
        for _ in range(10):
            stage.now_s += 0.1
            while len(stage.core.waiting) < 4:
                stage.submit(f"r{next(names)}", prompt_len=8, max_tokens=20, deadline_s=1e6)
            for peer in list(stage.peers.values()):
                peer.progress()
                stage.deliver(peer, len(peer.upward))
            stage.tell(ev.Tick())
        for peer in list(stage.peers.values()):
            stage.heartbeat(peer)

    while len(decode.jobs) < decode.hello.max_num_seqs:
        second()
    return second


@pytest.mark.parametrize("slots", [1, 4])
def test_a_prefill_worker_that_joins_a_saturated_cluster_gets_the_next_slot(slots: int) -> None:
    """Clients refilled each slot before a probe could have it, and the worker stayed not ready for as long as they came."""
    stage = probing(max_queued_requests=16)
    decode = stage.join("decode-0", Role.DECODE, num_blocks=1000, max_num_seqs=slots)
    stage.run()
    second = saturated(stage, decode)
    prefills = [stage.join(f"prefill-{n}", Role.PREFILL, num_blocks=1000) for n in range(2)]
    assert reason(stage, prefills[0]) == "waiting for room on decode-0 for a KV round trip"
    for _ in range(12):  # a request lasts 2 to 3 s
        second()
    assert [reason(stage, prefill) for prefill in prefills] == ["", ""]
    worker = stage.core.registry.get(decode.link)
    assert worker is not None
    assert worker.claimed_by is None
    assert len(decode.jobs) == slots, "and clients have the room again"


def test_a_claim_ends_with_whoever_made_it() -> None:
    stage = probing(max_queued_requests=16)
    decode = stage.join("decode-0", Role.DECODE, num_blocks=1000, max_num_seqs=1)
    stage.run()
    second = saturated(stage, decode)
    prefill = stage.join("prefill-0", Role.PREFILL)
    worker = stage.core.registry.get(decode.link)
    assert worker is not None
    assert worker.claimed_by == prefill.link
    stage.leave(prefill)
    assert worker.claimed_by is None
    done = sum(outcome.ended == ["done"] for outcome in stage.outcomes.values())
    for _ in range(10):
        second()
    assert sum(outcome.ended == ["done"] for outcome in stage.outcomes.values()) > done


def test_another_decode_worker_with_room_is_preferred_to_waiting() -> None:
    stage = probing(max_queued_requests=16)
    full = stage.join("decode-0", Role.DECODE, num_blocks=1000, max_num_seqs=1)
    stage.run()
    saturated(stage, full)
    other = stage.join("decode-1", Role.DECODE, num_blocks=10_000, max_num_seqs=9)
    for _ in range(3):
        other.progress()
        stage.deliver(other, len(other.upward))
    prefill = stage.join("prefill-0", Role.PREFILL)
    assert full.jobs
    for _ in range(4):
        for peer in (prefill, other):
            peer.progress()
            stage.deliver(peer, len(peer.upward))
    assert reason(stage, prefill) == ""
    assert other.attached_to == [prefill.hello.incarnation]


def test_a_pair_that_lets_short_deadlines_pass_is_looked_at_and_found_out() -> None:
    """KV of prefill-0 never comes at decode-0, and each request's time is up before anybody can say so. That is no evidence
    against the pair; the probe that it is reason for finds some."""
    stage = probing()
    prefill, decode = stage.join("prefill-0", Role.PREFILL), stage.join("decode-0", Role.DECODE)
    stage.run()
    assert (reason(stage, prefill), reason(stage, decode)) == ("", "")
    outcome = stage.submit("r", deadline_s=2.0)
    for peer in (decode, prefill):
        stage.deliver(peer)
    prefill.progress()
    stage.deliver(prefill, 9)
    assert outcome.emitted == [0]
    stage.now_s += 2.1
    stage.tell(ev.Tick())
    assert outcome.ended == ["deadline_exceeded"]
    assert not list(stage.core.pairs.set_aside(now_s=stage.now_s)), "no evidence yet"
    decode.unreadable.add(prefill.hello.incarnation)
    later(stage, 0.5)
    (aside,) = stage.core.pairs.set_aside(now_s=stage.now_s)
    assert aside.reason == "no route"
    stage.assert_empty()
