"""Role flips in the router's core: which ones are refused, and that nothing of the old incarnation is left."""

from __future__ import annotations

from typing import TypeVar

import pytest

from pdserve.core.errors import CannotFlip, StaleOrder, Unavailable, UnknownWorker
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.worker import Role
from router.core import events as ev

from .core_peers import Peer, Stage

E = TypeVar("E", bound=ev.Effect)


def pools(*, prefill: int = 2, decode: int = 2, **config: object) -> Stage:
    stage = Stage(recovery_wait_s=0.1, **config)
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        for number in range(count):
            stage.join(f"{role.value}-{number}", role)
    return stage


def named(stage: Stage, worker_id: str) -> Peer:
    return next(peer for peer in stage.peers.values() if peer.hello.worker_id == worker_id)


def ask(stage: Stage, worker_id: str, role: Role, incarnation: int | None = None) -> None:
    stage.tell(ev.FlipAsked(WorkerId(worker_id), role, None if incarnation is None else Incarnation(incarnation)))


def sent(stage: Stage, kind: type[E]) -> list[E]:
    return [effect for effect in stage.effects if isinstance(effect, kind)]


DEGREES = "prefill.engine.tensor_parallel_size 1 and decode.engine.tensor_parallel_size 2 differ"


@pytest.mark.parametrize(
    ("worker_id", "role", "why"),
    [
        ("prefill-0", Role.PREFILL, "has this role already"),
        ("decode-0", Role.DECODE, "has this role already"),
        ("decode-1", Role.PREFILL, f"cannot change its role: {DEGREES}"),
        ("prefill-1", Role.DECODE, "drains already"),
    ],
)
def test_a_flip_that_cannot_be_is_refused_by_name_and_changes_nothing(worker_id: str, role: Role, why: str) -> None:
    stage = pools(decode=1)
    stage.join("decode-1", Role.DECODE, flip_obstacle=DEGREES)
    stage.tell(ev.DrainAsked(WorkerId("prefill-1")))
    before = len(stage.effects)
    with pytest.raises(CannotFlip, match=f"worker_id: .*{worker_id} {why}") as caught:
        ask(stage, worker_id, role)
    assert caught.value.field == "worker_id"
    assert len(stage.effects) == before
    assert not named(stage, "decode-0").draining


def test_a_flip_of_an_unknown_worker_or_of_another_incarnation_is_refused() -> None:
    stage = pools()
    with pytest.raises(UnknownWorker):
        ask(stage, "moon", Role.DECODE)
    with pytest.raises(StaleOrder, match="has incarnation"):
        ask(stage, "prefill-0", Role.DECODE, incarnation=5)
    assert sent(stage, ev.SendFlip) == []


def test_the_last_decode_worker_stays_and_two_flips_do_not_take_both() -> None:
    stage = pools()
    ask(stage, "decode-0", Role.PREFILL)
    with pytest.raises(CannotFlip, match="the last decode worker"):
        ask(stage, "decode-1", Role.PREFILL)


@pytest.mark.parametrize("placement", ["auto", "disaggregated"])
def test_the_last_prefill_worker_stays_where_no_request_is_colocated(placement: str) -> None:
    stage = pools(prefill=1, placement=placement)
    if placement == "disaggregated":
        with pytest.raises(CannotFlip, match="the last prefill worker"):
            ask(stage, "prefill-0", Role.DECODE)
    else:
        ask(stage, "prefill-0", Role.DECODE)
        assert [effect.role for effect in sent(stage, ev.SendFlip)] == [Role.DECODE]


def test_a_flip_finishes_what_is_there_and_nothing_of_the_old_incarnation_is_left() -> None:
    """(1) Requests run over both pairs. (2) A decode worker flips: it gets nothing new and finishes its own. (3) It joins as a
    prefill worker, and the next requests use it as one."""
    stage = pools()
    first = [stage.submit(f"r{n}", max_tokens=6) for n in range(4)]
    for peer in list(stage.peers.values()):
        stage.deliver(peer, 1)
    flipping = named(stage, "decode-0")
    ask(stage, "decode-0", Role.PREFILL, incarnation=flipping.hello.incarnation)
    later = [stage.submit(f"s{n}", max_tokens=6) for n in range(4)]
    stage.run()
    assert [outcome.ended for outcome in first + later] == [["done"]] * 8
    assert all(outcome.report is not None and outcome.report.attempts == 1 for outcome in first + later)

    back = stage.flipped(flipping)
    core = stage.core
    assert core.registry.get(flipping.link) is None
    assert [w.hello.worker_id for w in core.registry.of_role(Role.DECODE)] == ["decode-1"]
    assert not core.linked(WorkerId("decode-0")).draining
    stage.leave(named(stage, "prefill-0"))
    stage.leave(named(stage, "prefill-1"))
    before = len(stage.effects)
    last = stage.submit("last", prompt_len=20, max_tokens=4)
    stage.run()
    assert [e.link for e in stage.effects[before:] if isinstance(e, ev.SendPrefill)] == [back.link]
    assert last.ended == ["done"]
    stage.assert_empty()


def test_a_worker_that_flipped_is_probed_before_it_serves() -> None:
    stage = pools(probe_workers=True)
    stage.run()
    flipping = named(stage, "prefill-0")
    ask(stage, "prefill-0", Role.DECODE)
    stage.run()
    back = stage.flipped(flipping)
    worker = stage.core.linked(WorkerId("prefill-0"))
    assert not worker.readiness.ready
    stage.run()
    assert worker.readiness.ready
    assert worker.link == back.link
    stage.assert_empty()


def test_a_flip_is_told_again_after_a_broken_link_and_not_to_the_next_incarnation() -> None:
    stage = pools()
    peer = named(stage, "prefill-0")
    ask(stage, "prefill-0", Role.DECODE)
    stage.leave(peer)
    again = stage.join("prefill-0", Role.PREFILL, incarnation=peer.hello.incarnation)
    assert [(e.link, e.role) for e in sent(stage, ev.SendFlip)] == [(peer.link, Role.DECODE), (again.link, Role.DECODE)]
    stage.flipped(again)
    stage.leave(named(stage, "prefill-0"))
    stage.join("prefill-0", Role.PREFILL)
    assert len(sent(stage, ev.SendFlip)) == 2
    assert not stage.core.linked(WorkerId("prefill-0")).draining


def test_a_drain_ends_a_flip_also_after_a_broken_link() -> None:
    stage = pools()
    peer = named(stage, "prefill-0")
    ask(stage, "prefill-0", Role.DECODE)
    stage.tell(ev.DrainAsked(WorkerId("prefill-0")))
    assert peer.next_role is None
    stage.leave(peer)
    again = stage.join("prefill-0", Role.PREFILL, incarnation=peer.hello.incarnation)
    assert (again.draining, again.next_role) == (True, None)


def test_a_worker_that_flips_gets_nothing_new() -> None:
    stage = pools(prefill=0, decode=2)
    ask(stage, "decode-0", Role.PREFILL)
    stage.leave(named(stage, "decode-1"))
    with pytest.raises(Unavailable):
        stage.submit("new")
