"""Readiness: who is probed with whom, what it takes to be ready, and that no client sees any of it."""

from __future__ import annotations

import pytest

from pdserve.core.errors import InternalBug, Unavailable
from router import events as ev
from router.probes import DEADLINE_S

from .core_peers import Peer, Stage


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
    prefill = stage.join("prefill-0", ev.Role.PREFILL)
    assert "no decode worker" in reason(stage, prefill)
    decode = stage.join("decode-0", ev.Role.DECODE)
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
    assert (len(bind.work.prompt_ids), bind.work.sampling.max_tokens, bind.work.sampling.ignore_eos) == (5, 2, True)
    assert not [e for e in stage.effects if isinstance(e, ev.EmitDelta | ev.EmitDone | ev.EmitFailed)]
    stage.assert_empty()


def test_a_decode_worker_alone_is_tried_with_itself_and_a_prefill_worker_that_joins_with_it() -> None:
    stage = probing()
    decode = stage.join("decode-0", ev.Role.DECODE)
    stage.run()
    assert reason(stage, decode) == ""
    assert [e.local_prefill for e in stage.effects if isinstance(e, ev.SendBind)] == [True]
    prefill = stage.join("prefill-0", ev.Role.PREFILL)
    assert reason(stage, prefill) == "waiting for a KV round trip"
    stage.run()
    assert reason(stage, prefill) == ""
    stage.assert_empty()


def test_requests_wait_for_workers_that_are_being_probed_and_go_to_no_other() -> None:
    stage = probing()
    with pytest.raises(Unavailable):
        stage.submit("nobody is linked")
    decode = stage.join("decode-0", ev.Role.DECODE)
    outcome = stage.submit("r")
    assert [e.work.request_id for e in stage.effects if isinstance(e, ev.SendBind)] != ["r"]
    assert stage.core.num_requests == 1, "the probe is nobody's request"
    worker = stage.core.registry.get(decode.link)
    assert worker is not None
    assert (len(worker.work), worker.requests_placed) == (1, 0)
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


def test_a_prefill_worker_whose_kv_reaches_nobody_says_so_and_is_tried_again() -> None:
    stage = probing()
    decode = stage.join("decode-0", ev.Role.DECODE)
    stage.run()
    prefill = stage.join("prefill-0", ev.Role.PREFILL)
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
    prefill = stage.join("prefill-0", ev.Role.PREFILL)
    decode = stage.join("decode-0", ev.Role.DECODE)
    decode.unreadable.add(prefill.hello.incarnation)
    stage.run()
    assert "no route" in reason(stage, decode)
    later(stage, 1.0)
    assert reason(stage, decode) == ""
    assert reason(stage, prefill) != ""
    stage.assert_empty()


def test_after_a_failure_the_next_peer_is_tried() -> None:
    stage = probing()
    decodes = [stage.join(f"decode-{n}", ev.Role.DECODE) for n in range(2)]
    stage.run()
    prefill = stage.join("prefill-0", ev.Role.PREFILL)
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
    decode = stage.join("decode-0", ev.Role.DECODE)
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
    prefill = stage.join("prefill-0", ev.Role.PREFILL)
    decode = stage.join("decode-0", ev.Role.DECODE)
    stage.deliver(decode)
    stage.leave(decode)
    assert "a peer that left failed" in reason(stage, prefill)
    stage.join("decode-0", ev.Role.DECODE)
    stage.run()
    later(stage, 1.0)
    assert reason(stage, prefill) == ""
    assert not len(stage.core.pairs)
    stage.assert_empty()


def test_a_worker_that_dials_again_must_show_again_that_kv_passes() -> None:
    stage = probing()
    decode = stage.join("decode-0", ev.Role.DECODE)
    stage.run()
    again = stage.join("decode-0", ev.Role.DECODE, incarnation=decode.hello.incarnation)
    assert reason(stage, again) == "waiting for a KV round trip"
    stage.run()
    assert reason(stage, again) == ""
    stage.assert_empty()


def test_a_full_decode_worker_says_nothing_about_the_pair() -> None:
    stage = probing()
    decode = stage.join("decode-0", ev.Role.DECODE)
    stage.run()
    decode.refuse = 1
    prefill = stage.join("prefill-0", ev.Role.PREFILL)
    stage.run()
    assert "no room" in reason(stage, prefill)
    assert not len(stage.core.pairs)
    later(stage, 1.0)
    assert reason(stage, prefill) == ""
    stage.assert_empty()


def test_a_draining_worker_is_no_peer_and_is_not_probed() -> None:
    stage = probing()
    prefill = stage.join("prefill-0", ev.Role.PREFILL)
    stage.tell(ev.DrainAsked(prefill.hello.worker_id))
    decode = stage.join("decode-0", ev.Role.DECODE)
    stage.run()
    assert (reason(stage, prefill), reason(stage, decode)) == ("draining", "")
    assert not [e for e in stage.effects if isinstance(e, ev.SendPrefill)]
    stage.assert_empty()


def test_a_peer_that_begins_to_drain_is_sent_no_prefill() -> None:
    stage = probing()
    prefill = stage.join("prefill-0", ev.Role.PREFILL)
    decode = stage.join("decode-0", ev.Role.DECODE)
    stage.tell(ev.DrainAsked(prefill.hello.worker_id))
    stage.run()
    assert "leaving" in reason(stage, decode)
    later(stage, 1.0)
    assert reason(stage, decode) == ""
    stage.assert_empty()


def test_a_broken_protocol_fails_the_probe_alone() -> None:
    stage = probing()
    decode = stage.join("decode-0", ev.Role.DECODE)
    (handle,) = decode.jobs
    del decode.jobs[handle]
    stage.tell(ev.RequestFailed(decode.link, handle, InternalBug("no engine")))
    assert "no engine" in reason(stage, decode)
    later(stage, 1.0)
    assert reason(stage, decode) == ""
    stage.assert_empty()
