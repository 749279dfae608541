"""The router heeds what a worker says of itself, and hands orders on to it: refusals, drains, heartbeats, budgets."""

from __future__ import annotations

import pytest

from pdserve.core.errors import InvalidRequest, Unavailable, UnknownWorker
from pdserve.core.ids import WorkerId
from pdserve.core.worker import Role
from router.core import events as ev
from tests.router.core.recovery.stages import pools, sent


def test_a_worker_that_turns_requests_away_is_not_asked_again_before_its_heartbeat() -> None:
    """It drains, its release has no better word for that, and the router has not heard so yet. Else its emptiness would draw
    every retry."""
    stage = pools(prefill=0, decode=0)
    refusing = stage.join("decode-0", Role.DECODE, link_version=0)
    stage.join("decode-1", Role.DECODE)
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
    old = stage.join("decode-7", Role.DECODE, link_version=1)
    with pytest.raises(InvalidRequest, match=r"max_num_seqs: .* speaks link version 1, which lacks it: upgrade the worker"):
        stage.tell(ev.BudgetAsked(old.hello.worker_id, 0, 2))
    assert [(e.link, e.max_num_batched_tokens) for e in sent(stage, ev.SendBudget)] == [
        (peer.link, 16),
        (peer.link, least),
        (small.link, 2),
    ]
