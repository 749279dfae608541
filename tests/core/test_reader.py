"""The reader machine: what is read when, when Commit is sent, and when discarded blocks may be used again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdserve.core.errors import IllegalTransition
from pdserve.core.ids import Incarnation, LeaseId
from pdserve.core.reader import (
    MAX_READS_IN_FLIGHT,
    TERMINAL,
    TRANSITIONS,
    Discard,
    Effect,
    PostRead,
    Reader,
    ReaderEvent,
    ReaderState,
    Reusable,
    SendCommit,
)

OURS, ANOTHER = LeaseId(Incarnation(1), 7), LeaseId(Incarnation(2), 7)


def reader(prompt_len: int = 30, *, first_block: int = 0) -> Reader:
    """Blocks of 4 tokens: the last of 30 tokens is half full."""
    return Reader(OURS, prompt_len, 4, first_block)


def committing() -> Reader:
    one = reader()
    one.advanced(OURS, 30)
    assert one.read_done(1) == [SendCommit(8)]
    return one


def with_reads_in_flight() -> Reader:
    one = reader()
    assert one.advanced(OURS, 4) == [PostRead(1, 0, 1)]
    assert one.advanced(OURS, 8) == [PostRead(2, 1, 1)]
    return one


class ReaderMachine(RuleBasedStateMachine):
    """Any order of what a lender, a transport and a caller may say; the checks keep books of their own."""

    @initialize(prompt_len=st.integers(1, 40), block_size=st.integers(1, 8), data=st.data())
    def start(self, prompt_len: int, block_size: int, data: st.DataObject) -> None:
        self.blocks = -(-prompt_len // block_size)
        self.first_block = data.draw(st.integers(0, self.blocks))
        self.reader = Reader(OURS, prompt_len, block_size, self.first_block)
        self.final = 0  # tokens that the lender called final
        self.reading: dict[int, range] = {}  # not stopped
        self.failed: set[int] = set()
        self.here: set[int] = set()
        self.seen: set[int] = set()
        self.commits = self.discards = self.reusables = 0
        self.discarded_in_flight = 0
        self.answered = False
        self.trouble_after = data.draw(st.integers(0, 12))  # without a quiet time nearly every run is abandoned at once
        self.quiet = 0

    def take(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case PostRead(read, first, count):
                    self.posted(read, range(first, first + count))
                case SendCommit(blocks):
                    self.commits += 1
                    assert blocks == self.blocks
                    assert not self.reading
                    assert self.here == set(range(self.first_block, self.blocks))
                    assert self.final == self.reader.prompt_len
                case Discard(in_flight):
                    self.discards += 1
                    self.discarded_in_flight = in_flight
                    assert in_flight == len(self.reading)
                case Reusable():
                    self.reusables += 1
                    assert self.discarded_in_flight > 0
                    assert not self.reading

    def posted(self, read: int, blocks: range) -> None:
        assert read not in self.seen
        assert len(blocks) > 0
        assert min((blocks[-1] + 1) * self.reader.block_size, self.reader.prompt_len) <= self.final
        assert blocks[0] >= self.first_block
        assert not self.here & set(blocks)
        assert not any(set(other) & set(blocks) for other in self.reading.values())
        self.seen.add(read)
        self.reading[read] = blocks

    @rule()
    def quiet_passes(self) -> None:
        self.quiet += 1

    @rule()
    def prefill_ends(self) -> None:
        self.advance(self.reader.prompt_len)

    @rule(watermark=st.integers(0, 42))
    def advance(self, watermark: int) -> None:
        self.quiet += 1
        if self.final <= watermark <= self.reader.prompt_len:
            self.final = watermark
        self.take(self.reader.advanced(OURS, watermark))

    @rule(watermark=st.integers(0, 42))
    def advance_of_another_lease(self, watermark: int) -> None:
        before = self.reader.watermark
        assert self.reader.advanced(ANOTHER, watermark) == []
        assert self.reader.watermark == before

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def a_read_ends_well(self, data: st.DataObject) -> None:
        """Also one that was past its deadline."""
        read = data.draw(st.sampled_from(sorted(self.reading)))
        blocks = self.reading.pop(read)
        if read not in self.failed:
            self.here |= set(blocks)
        self.take(self.reader.read_done(read))

    @precondition(lambda self: self.reading and self.quiet >= self.trouble_after)
    @rule(data=st.data())
    def a_read_fails(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(sorted(self.reading)))
        self.failed.add(read)
        self.take(self.reader.read_failed(read))
        assert self.reader.state is ReaderState.ABANDONED

    @precondition(lambda self: self.reader.state is ReaderState.ABANDONED and self.reading)
    @rule(data=st.data())
    def a_read_stops(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(sorted(self.reading)))
        del self.reading[read]
        self.take(self.reader.read_stopped(read))

    @precondition(lambda self: self.commits and not self.answered)
    @rule(ok=st.sampled_from([True, False, None]))
    def the_answer_to_commit(self, ok: bool | None) -> None:
        """None: CORRUPT."""
        self.answered = True
        before = self.reader.state
        self.take(self.reader.commit_corrupt() if ok is None else self.reader.commit_answered(ok))
        if before is ReaderState.COMMITTING:
            assert self.reader.state is (ReaderState.COMMITTED if ok else ReaderState.ABANDONED)
        else:
            assert self.reader.state is before

    @precondition(lambda self: self.quiet >= self.trouble_after)
    @rule()
    def gone(self) -> None:
        before = self.reader.state
        self.take(self.reader.lease_gone())
        assert (self.reader.state is before) == (before is not ReaderState.PULLING)

    @precondition(lambda self: self.quiet >= self.trouble_after)
    @rule()
    def abort(self) -> None:
        self.take(self.reader.abort())
        assert self.reader.ended

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "reader"):
            return
        self.reader.check_invariants()
        abandoned = self.reader.state is ReaderState.ABANDONED
        assert set(self.reader.in_flight) == set(self.reading)
        assert self.commits <= 1
        assert self.discards == abandoned
        assert self.reusables == (abandoned and self.discarded_in_flight > 0 and not self.reading)
        if self.reader.state is ReaderState.PULLING and len(self.reading) < MAX_READS_IN_FLIGHT:
            assert self.reader.posted == max(self.reader.readable, self.first_block), "a final block waits for nothing"
        if self.reader.state is ReaderState.PULLING and not self.reading:
            assert self.final < self.reader.prompt_len, "all is read, and no Commit was sent"


TestReaderMachine = ReaderMachine.TestCase
TestReaderMachine.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)


def test_a_prompt_of_three_chunks_is_read_chunk_by_chunk() -> None:
    """(1) A chunk ends inside a block: that block waits; (2) two reads at once, later blocks share the next; (3) commit."""
    one = reader()
    assert one.advanced(OURS, 10) == [PostRead(1, 0, 2)]
    assert one.advanced(OURS, 20) == [PostRead(2, 2, 3)]
    assert one.advanced(OURS, 24) == []
    assert one.advanced(OURS, 30) == []
    assert one.read_done(2) == [PostRead(3, 5, 3)]
    assert one.read_done(1) == []
    assert one.read_done(3) == [SendCommit(8)]
    assert one.commit_answered(ok=True) == []
    assert one.state is ReaderState.COMMITTED
    assert one.history == ["ALL_READ:COMMITTING", "COMMIT_OK:COMMITTED"]


def test_a_prompt_that_is_all_here_already_is_committed_once_it_is_final() -> None:
    one = reader(first_block=8)
    assert one.advanced(OURS, 29) == []
    assert one.advanced(OURS, 30) == [SendCommit(8, first=8)]


def test_an_absurd_watermark_changes_nothing() -> None:
    one = reader()
    one.advanced(OURS, 12)
    assert one.advanced(OURS, 8) == one.advanced(OURS, 31) == one.advanced(OURS, -1) == []
    assert one.watermark == 12


def test_blocks_are_reusable_only_after_the_last_of_two_reads_has_stopped() -> None:
    """(1) One fails and stops; (2) the other still writes; (3) it ends, well as it happens: reusable, once."""
    one = with_reads_in_flight()
    assert one.read_failed(1) == [Discard(2)]
    assert one.read_failed(2) == []
    assert one.read_stopped(1) == []
    assert one.read_done(2) == [Reusable()]
    assert one.abort() == one.lease_gone() == one.advanced(OURS, 30) == []


def test_gone_that_is_pushed_does_not_outrun_the_answer_to_our_own_commit() -> None:
    one = committing()
    assert one.lease_gone() == []
    assert one.commit_answered(ok=True) == []
    assert one.state is ReaderState.COMMITTED


@pytest.mark.parametrize("make", [reader, with_reads_in_flight, committing])
def test_no_answer_or_gone_is_no_commit(make: object) -> None:
    one = make()  # type: ignore[operator]
    one.abort()
    assert one.commit_answered(ok=True) == one.commit_answered(ok=False) == one.commit_corrupt() == []
    assert one.state is ReaderState.ABANDONED


@pytest.mark.parametrize("event", ["read_done", "read_failed", "read_stopped"])
@pytest.mark.parametrize("make", [reader, with_reads_in_flight, committing])
def test_news_of_a_read_that_is_not_in_flight_raises_with_history_and_changes_nothing(make: object, event: str) -> None:
    one = make()  # type: ignore[operator]
    before = (one.state, dict(one.in_flight), one.blocks_read)
    with pytest.raises(IllegalTransition) as raised:
        getattr(one, event)(9)
    assert raised.value.history == tuple(one.history)
    assert f"{event.upper()}(9)" in str(raised.value)
    assert (one.state, dict(one.in_flight), one.blocks_read) == before


def test_a_read_that_neither_ended_nor_failed_cannot_have_stopped() -> None:
    one = with_reads_in_flight()
    with pytest.raises(IllegalTransition):
        one.read_stopped(1)
    assert one.in_flight == {1: 1, 2: 1}


def test_ok_to_a_commit_that_was_never_sent_raises() -> None:
    with pytest.raises(IllegalTransition):
        with_reads_in_flight().commit_answered(ok=True)


def test_the_end_is_the_end() -> None:
    """No transition leads out of COMMITTED or ABANDONED, and each absorbs what others may still say."""
    for state, event in itertools.product(TERMINAL, ReaderEvent):
        assert TRANSITIONS.get((state, event), state) is state
    late = {ReaderEvent.ADVANCED, ReaderEvent.LEASE_GONE, ReaderEvent.ABORT}
    for state in TERMINAL:
        assert late <= {event for source, event in TRANSITIONS if source is state}


def test_commit_carries_the_checksums_of_every_group_in_the_order_of_the_prompt():
    """The second read arrives first."""
    one = reader(20, first_block=1)
    one.advanced(OURS, 12)
    one.advanced(OURS, 20)
    one.read_done(2, ((13, 14), (23, 24)))  # type: ignore[arg-type]
    assert one.read_done(1, ((11, 12), (21, 22))) == [SendCommit(5, 1, ((11, 12, 13, 14), (21, 22, 23, 24)))]  # type: ignore[arg-type]
