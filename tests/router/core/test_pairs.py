"""Pairs of workers between which KV does not pass: as a pure object, and in placement."""

from __future__ import annotations

import math

from pdserve.core.errors import IncompatiblePeer
from pdserve.core.ids import Incarnation
from pdserve.core.sampling import Placement
from pdserve.core.worker import Role
from router.core import events as ev
from router.core.health import Pairs

from ..core_peers import Stage, hello

P = hello("prefill-0", Role.PREFILL, incarnation=Incarnation(1))
D = hello("decode-0", Role.DECODE, incarnation=Incarnation(2))
D_ANEW = hello("decode-0", Role.DECODE, incarnation=Incarnation(3))


def fresh() -> Pairs:
    return Pairs(aside_s=5.0, aside_max_s=60.0)


def test_a_pair_is_set_aside_longer_with_each_failure_and_tried_again_in_between() -> None:
    pairs, now_s, lengths = fresh(), 0.0, []
    for _ in range(6):
        assert pairs.usable(P, D, now_s=now_s)
        pairs.failed(P, D, "no route", now_s=now_s)
        (aside,) = pairs.set_aside(now_s=now_s)
        lengths.append(aside.until_s - now_s)
        assert not pairs.usable(P, D, now_s=aside.until_s - 0.01)
        now_s = aside.until_s
    assert lengths == [5, 10, 20, 40, 60, 60]
    assert aside.failures == 6


def test_failures_of_one_fault_count_once() -> None:
    """A batch of 64 pulls fails together."""
    pairs = fresh()
    for _ in range(64):
        pairs.failed(P, D, "no route", now_s=0.0)
    (aside,) = pairs.set_aside(now_s=0.0)
    assert (aside.failures, aside.until_s) == (1, 5.0)


def test_success_clears_and_the_next_failure_starts_anew() -> None:
    pairs = fresh()
    for now_s in (0.0, 5.0):
        pairs.failed(P, D, "no route", now_s=now_s)
    pairs.succeeded(P, D)
    assert pairs.usable(P, D, now_s=6.0)
    pairs.failed(P, D, "no route", now_s=6.0)
    (aside,) = pairs.set_aside(now_s=6.0)
    assert aside.until_s == 11.0


def test_a_worker_started_anew_is_a_new_pair_and_incompatible_ones_are_never_paired_again() -> None:
    pairs = fresh()
    pairs.never(P, D, "other layout")
    assert not pairs.usable(P, D, now_s=1e9)
    assert pairs.usable(P, D_ANEW, now_s=0.0)
    (aside,) = pairs.set_aside(now_s=1e9)
    assert math.isinf(aside.until_s)


def test_pairs_of_workers_that_have_gone_are_forgotten_in_the_end() -> None:
    pairs = fresh()
    pairs.failed(P, D, "no route", now_s=0.0)
    pairs.never(P, D_ANEW, "other layout")
    pairs.forget({Incarnation(1), Incarnation(2), Incarnation(3)}, now_s=1e6)
    assert len(pairs) == 2
    pairs.forget({Incarnation(1)}, now_s=1.0)
    assert len(pairs) == 1, "it may come back, and its failures still count"
    pairs.forget({Incarnation(1)}, now_s=66.0)
    assert len(pairs) == 0


def cut(stage: Stage, prefill: int, decode: int) -> None:
    """KV of one prefill worker does not reach one decode worker any more."""
    workers = {p.hello.worker_id: p for p in stage.peers.values()}
    lender = workers[f"prefill-{prefill}"].hello.incarnation  # type: ignore[index]
    workers[f"decode-{decode}"].unreadable.add(lender)  # type: ignore[index]


def served_by(stage: Stage, name: str, **fields: object) -> tuple[str, str, str]:
    outcome = stage.submit(name, **fields)  # type: ignore[arg-type]
    stage.run()
    assert outcome.ended == ["done"]
    assert outcome.report is not None
    return outcome.report.prefill_worker, outcome.report.decode_worker, outcome.report.placement_reason


def cluster(prefill: int, decode: int) -> Stage:
    stage = Stage(retry_burst=100)
    for n in range(prefill):
        stage.join(f"prefill-{n}", Role.PREFILL)
    for n in range(decode):
        stage.join(f"decode-{n}", Role.DECODE)
    return stage


def test_a_partition_between_one_pair_costs_one_try_and_no_request() -> None:
    stage = cluster(2, 2)
    cut(stage, 0, 0)
    for n in range(12):
        prefill, decode, _ = served_by(stage, f"r{n}")
        assert (prefill, decode) != ("prefill-0", "decode-0")
    assert sum(o.report.attempts - 1 for o in stage.outcomes.values() if o.report) <= 1
    stage.assert_empty()


def test_a_decode_worker_that_reaches_no_prefill_worker_gets_no_handoffs() -> None:
    stage = cluster(1, 2)
    cut(stage, 0, 0)
    assert {served_by(stage, f"r{n}")[1] for n in range(6)} == {"decode-1"}
    stage.assert_empty()


def test_with_every_pair_set_aside_requests_are_colocated_until_its_time_is_over() -> None:
    stage = cluster(1, 1)
    cut(stage, 0, 0)
    assert served_by(stage, "first") == ("", "decode-0", "pairs_set_aside")
    forced = stage.submit("forced", placement=Placement.DISAGGREGATED)
    stage.run()
    assert not forced.ended, "who insists waits for the pair"
    for peer in stage.peers.values():
        peer.unreadable.clear()
    stage.now_s += 5.1
    for peer in list(stage.peers.values()):
        stage.heartbeat(peer)
    stage.tell(ev.Tick())
    assert served_by(stage, "again") == ("prefill-0", "decode-0", "default")
    assert forced.ended == ["done"]
    assert len(stage.core.pairs) == 0
    stage.assert_empty()


def test_an_admitted_request_that_insists_waits_for_the_pair() -> None:
    stage = cluster(1, 1)
    cut(stage, 0, 0)
    outcome = stage.submit("forced", placement=Placement.DISAGGREGATED)
    stage.run()
    assert not outcome.ended
    for peer in list(stage.peers.values()):
        peer.unreadable.clear()
        stage.now_s += 2.6
        for each in list(stage.peers.values()):
            stage.heartbeat(each)
        stage.tell(ev.Tick())
    stage.run()
    assert outcome.ended == ["done"]
    stage.assert_empty()


def test_incompatible_workers_are_not_paired_again_and_the_request_is_served() -> None:
    stage = cluster(1, 1)
    decode = next(p for p in stage.peers.values() if p.hello.role is Role.DECODE)
    outcome = stage.submit("r")
    for peer in list(stage.peers.values())[::-1]:
        stage.deliver(peer)
    (handle,) = decode.jobs
    del decode.jobs[handle]
    stage.tell(ev.RequestFailed(decode.link, handle, IncompatiblePeer("layouts differ")))
    stage.run()
    assert outcome.ended == ["done"]
    stage.now_s += 1000.0
    for peer in list(stage.peers.values()):
        stage.heartbeat(peer)
    assert served_by(stage, "later")[2] == "pairs_set_aside"
    stage.assert_empty()
