"""Workers whose weights differ in bytes that no fingerprint sees: who is let in, and who is paired."""

from __future__ import annotations

import asyncio

import pytest

from pdserve.core.errors import IncompatiblePeer
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role, WorkerHello
from router.core import events as ev

from ..core.recovery.stages import sent
from ..core.test_pairs import served_by
from ..core_peers import Stage, hello
from .test_versions import closed

RIGHT, WRONG = "a" * 64, "b" * 64


def test_the_first_workers_weights_decide_and_others_are_refused_by_name() -> None:
    stage = Stage()
    stage.join("decode-0", Role.DECODE, model_digest=RIGHT)
    stage.join("prefill-0", Role.PREFILL, model_digest=RIGHT)
    stage.tell(ev.WorkerJoined(ev.LinkId(99), hello("prefill-1", Role.PREFILL, model_digest=WRONG)))
    (error,) = closed(stage)
    assert isinstance(error, IncompatiblePeer)
    for part in ("prefill worker prefill-1", WRONG[:16], "decode worker decode-0", RIGHT[:16], "load the same files on both"):
        assert part in error.message
    outcome = stage.submit("r", placement=Placement.DISAGGREGATED)
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


def test_other_weights_are_let_in_once_nobody_with_the_first_ones_is_left() -> None:
    """So a cluster can change its weights, by leaving the old ones first; the two never meet."""
    stage = Stage()
    old = stage.join("decode-0", Role.DECODE, model_digest=RIGHT)
    assert stage.core.registry.model_digest == RIGHT
    stage.leave(old)
    assert stage.core.registry.model_digest == RIGHT  # for the prompts that wait
    stage.join("decode-1", Role.DECODE, model_digest=WRONG)
    assert stage.core.registry.model_digest == WRONG
    assert not closed(stage)


def test_a_worker_that_comes_back_with_other_weights_is_measured_against_the_others_alone() -> None:
    stage = Stage()
    one = stage.join("decode-0", Role.DECODE, model_digest=RIGHT)
    stage.leave(one)
    stage.join("decode-0", Role.DECODE, model_digest=WRONG)
    assert not closed(stage)


def test_a_worker_of_unknown_digest_serves_and_pairs_only_with_its_like() -> None:
    """It is of an older release: its weights may be any that have the fingerprint."""
    stage = Stage()
    stage.join("decode-old", Role.DECODE)
    stage.join("prefill-new", Role.PREFILL, model_digest=RIGHT)
    assert not closed(stage)
    assert served_by(stage, "r") == ("", "decode-old", "versions_differ")
    stage.join("decode-new", Role.DECODE, model_digest=RIGHT)
    stage.join("prefill-old", Role.PREFILL)
    outcomes = [stage.submit(f"r{index}", placement=Placement.DISAGGREGATED) for index in range(8)]
    stage.run()
    reports = [outcome.report for outcome in outcomes if outcome.report]
    assert [outcome.ended for outcome in outcomes] == [["done"]] * 8
    assert all(one.prefill_worker.split("-")[1] == one.decode_worker.split("-")[1] for one in reports)
    assert {one.decode_worker for one in reports} == {"decode-old", "decode-new"}
    stage.assert_empty()


def test_the_digest_becomes_known_with_the_first_new_worker() -> None:
    stage = Stage()
    stage.join("decode-old", Role.DECODE)
    assert stage.core.registry.model_digest == ""
    stage.join("decode-new", Role.DECODE, model_digest=RIGHT)
    assert stage.core.registry.model_digest == RIGHT


def test_a_prefill_worker_without_a_partner_of_its_weights_says_so() -> None:
    stage = Stage(probe_workers=True)
    stage.join("prefill-new", Role.PREFILL, model_digest=RIGHT)
    stage.join("decode-old", Role.DECODE)
    stage.run()
    assert not sent(stage, ev.SendPrefill)
    reasons = {w.hello.worker_id: w.readiness.reason for w in stage.core.registry}
    assert reasons["prefill-new"].endswith(f"no decode worker has weights of its digest ({RIGHT[:16]})")


def test_the_stage_finds_a_pair_with_other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerHello, "may_pair", lambda self, other: True)
    monkeypatch.setattr(WorkerHello, "pairing", property(lambda self: (self.peer_versions, "")))
    with pytest.raises(AssertionError, match="paired with other weights"):
        test_a_worker_of_unknown_digest_serves_and_pairs_only_with_its_like()


@pytest.mark.parametrize(("ours", "theirs"), [(RIGHT, WRONG), (RIGHT, ""), ("", RIGHT)])
def test_two_workers_refuse_each_other_themselves(ours: str, theirs: str) -> None:
    """Either side would do: the router may know nothing, or be wrong."""
    from tests.seams.test_transport_names import link_to

    async def shake(mine: str) -> bytes:
        async with link_to("nixl", model_digest=theirs) as link:
            link._model_digest = mine
            return await link.handshake()

    assert asyncio.run(shake(theirs)) == b"agent"
    with pytest.raises(IncompatiblePeer, match="load the same files on both") as caught:
        asyncio.run(shake(ours))
    assert all((digest[:16] or "unknown") in caught.value.message for digest in (ours, theirs))
