"""A link that is cut anywhere, any number of times, brings each side all that the other has said, once and in order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.core.errors import ReplicaLost
from pdserve.rpc import bundle
from pdserve.rpc.bundle import Incoming, Kept, Outbound, unbundled
from pdserve.rpc.v1 import link_pb2

STEPS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), max_size=120)


def said(text: str, number: int = 0) -> link_pb2.WorkerMessage:
    return link_pb2.WorkerMessage(worker_lost=link_pb2.WorkerLost(message=text), number=number)


class End:
    """One end of a link, and what is under way from it."""

    def __init__(self) -> None:
        self.incoming = Incoming()
        self.outbound: Outbound[link_pb2.WorkerMessage] = Outbound(10_000, self.incoming)
        self.outbound.bundles = True
        self.outbound.keep()
        self.under_way: deque[bytes] = deque()
        self.said: list[str] = []
        self.heard: list[str] = []

    def say(self) -> None:
        self.said.append(f"{len(self.said)}")
        self.outbound.put(said(self.said[-1]))

    def write(self) -> None:
        if self.outbound._waiting or self.outbound._again:
            try:
                self.outbound.next().send(None)
            except StopIteration as written:  # something waits, so it returns without a loop
                self.under_way.append(written.value.SerializeToString())

    def hear(self, other: End) -> None:
        if other.under_way:
            message = link_pb2.WorkerMessage.FromString(other.under_way.popleft())
            if self.incoming.is_new(message.number):
                self.outbound.confirm(message.received)
                self.heard += [one.worker_lost.message for one in unbundled(message)]


def cut(ends: tuple[End, End], rng: random.Random) -> None:
    """What is under way is lost from some message on. Then each side says what it has, and goes on."""
    for end, other in (ends, ends[::-1]):
        for _ in range(rng.randint(0, len(end.under_way))):
            other.hear(end)
        end.under_way.clear()
    for end, other in (ends, ends[::-1]):
        end.outbound.again(other.incoming.last)


def run(steps: list[tuple[int, int]]) -> None:
    ends, rng = (End(), End()), random.Random(len(steps))
    for act, side in steps:
        end, other = ends[side], ends[1 - side]
        if act < 2:
            end.say()
        elif act == 2:
            end.write()
        elif act < 5:
            end.write()
            other.hear(end)
        else:
            cut(ends, rng)
    cut(ends, rng)
    for end, other in (ends, ends[::-1]):
        while end.outbound._waiting or end.outbound._again:
            end.write()
        while end.under_way:
            other.hear(end)
        assert other.heard == end.said


@given(STEPS)
def test_nothing_is_lost_and_nothing_is_heard_twice(steps: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundle, "MAX_BUNDLE_MESSAGES", 3)
        run(steps)


def _first_is_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    real = Kept.after
    patch.setattr(Kept, "after", lambda self, number: real(self, number)[1:])


def _confirmed_ahead(patch: pytest.MonkeyPatch) -> None:
    real = Kept.confirm
    patch.setattr(Kept, "confirm", lambda self, number: real(self, number + 1))


def _received_is_said_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Incoming, "last", property(lambda self: self._last + 1))


def _repeats_are_new(patch: pytest.MonkeyPatch) -> None:
    real = Kept.after
    patch.setattr(Kept, "after", lambda self, number: real(self, number) * 2)
    patch.setattr(Incoming, "is_new", lambda self, number: setattr(self, "_last", max(self._last, number)) or True)


MUTANTS = (_first_is_not_sent_again, _confirmed_ahead, _received_is_said_ahead, _repeats_are_new)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.__name__)
def test_a_broken_rule_is_found(mutant: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    mutant(monkeypatch)

    def found(seed: int) -> bool:
        rng = random.Random(seed)
        try:
            run([(rng.randint(0, 5), rng.randint(0, 1)) for _ in range(60)])
        except (AssertionError, ReplicaLost):
            return True
        return False

    assert any(found(seed) for seed in range(50))


def test_what_is_kept_is_bounded_and_tells_what_was_given_up() -> None:
    size = said("x" * 100, 1).ByteSize()
    kept: Kept[link_pb2.WorkerMessage] = Kept(last=4, limit_bytes=3 * size)
    for number in range(5, 13):
        kept.add(said("x" * 100, number))
    assert [message.number for message in kept.after(9)] == [10, 11, 12]
    with pytest.raises(ReplicaLost, match=r"message 9 .* not kept any more, nor are others up to 9"):
        kept.after(8)


def test_a_peer_that_has_what_was_never_sent_is_not_gone_on_with() -> None:
    kept: Kept[link_pb2.WorkerMessage] = Kept(last=1)
    kept.add(said("a", 2))
    kept.confirm(99)
    assert kept.after(2) == []
    with pytest.raises(ReplicaLost, match="has message 3"):
        kept.after(3)


def test_nothing_is_taken_up_again_where_nothing_is_kept() -> None:
    with pytest.raises(ReplicaLost, match="nothing of this link was kept"):
        Outbound[link_pb2.WorkerMessage](3).again(0)
