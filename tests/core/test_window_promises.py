"""A prompt takes its blocks behind a sliding window chunk by chunk: what it is promised is always enough, and nobody else's.

The model of these tests derives by search what each step holds.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pdserve.core.block_hash import BlockHash
from pdserve.core.block_pools import BlockPools, Prefill, WindowPool
from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.errors import PdserveError
from pdserve.core.ids import NULL_BLOCK, SeqId
from pdserve.core.kv_layout import KvGroup

SIZE = 2
HASHES = [BlockHash(bytes([i]) * 32) for i in range(14)]
"""The hashes of one prompt's blocks. All sequences of these tests compute this prompt."""


def layout(window: int | None, block_size: int = SIZE) -> KvGroup:
    return KvGroup((0,), ((1, 2),), block_size, "float32", window)


def sequence(i: int) -> Holder:
    return Holder(HolderKind.SEQUENCE, SeqId(i))


def lease(i: int) -> Holder:
    return Holder(HolderKind.LEASE, SeqId(i))


def held_by_any_step(first: int, end: int, window: int, block_size: int, chunk: int) -> int:
    """Search all steps that compute at most `chunk` tokens for the one that holds the most blocks from `first` on."""
    most, tokens = 0, end * block_size
    for start in range(first * block_size, tokens):
        for stop in range(start + 1, min(start + chunk, tokens) + 1):
            keys = range(max(0, start - window + 1), stop)
            most = max(most, len({key // block_size for key in keys} - set(range(first))))
    return most


spans = st.tuples(st.integers(0, 6), st.integers(0, 14)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(spans, st.integers(1, 14), st.integers(1, 5), st.integers(1, 16))
@settings(deadline=None)
def test_the_most_held_blocks_are_those_of_the_worst_step(
    span: tuple[int, int], window: int, block_size: int, chunk: int
) -> None:
    first, end = span
    assert layout(window, block_size).most_held(first, end, chunk) == held_by_any_step(first, end, window, block_size, chunk)
    assert layout(None, block_size).most_held(first, end, chunk) == end - first


@given(st.integers(1, 14), st.integers(1, 5))
@settings(deadline=None)
def test_a_promise_is_enough_for_steps_of_one_block_and_no_more_than_that(window: int, block_size: int) -> None:
    one = layout(window, block_size)
    assert one.least_promise == held_by_any_step(0, 30, window, block_size, block_size + 1)


class PromisesMachine(RuleBasedStateMachine):
    """Random prompts over groups without a window, or none, and groups with windows whose pools are as small as they may be."""

    @initialize(
        windows=st.lists(st.sampled_from([None, 1, 2, 3, 5]), min_size=1, max_size=3),
        more=st.integers(0, 3),
        chunk=st.integers(1, 9),
    )
    def start(self, windows: list[int | None], more: int, chunk: int) -> None:
        layouts = [layout(window) for window in windows]
        least = [next(n for n in range(1, 99) if one.window is None or one.longest_table(n) is None) for one in layouts]
        sizes = [16 if one.window is None else n + more for one, n in zip(layouts, least, strict=True)]
        self.layouts, self.chunk = layouts, chunk
        self.pools = BlockPools(*sizes, layouts=layouts)
        self.running: dict[int, tuple[int, Prefill, int]] = {}  # blocks, prompt, computed tokens
        self.lent: list[int] = []
        self.others: list[int] = []
        self.last = 0

    @rule(tokens=st.integers(1, 26), grows=st.booleans(), lent=st.booleans(), cached=st.booleans())
    def begin(self, tokens: int, grows: bool, lent: bool, cached: bool) -> None:
        self.last += 1
        count = -(-tokens // SIZE) + (grows and not lent)
        hashes = HASHES[: (tokens - 1) // SIZE] if cached else []
        prefill = Prefill(tokens, self.chunk, lent)
        fits, idle = self.pools.shortage(count, hashes, prefill=prefill) is None, not self.pools.counts().held
        room = self.pools.reserve(sequence(self.last), count, hashes, prefill=prefill)
        assert fits == (room is not None)
        assert fits or not idle, "an empty pool takes everybody"
        if room is not None:
            self.running[self.last] = (count, prefill, room.hits * SIZE)
        if room is not None and lent:
            tables = self.pools.share(sequence(self.last), lease(self.last), tokens)
            self.lent.append(self.last)
            for one, table in zip(self.layouts, tables, strict=True):
                assert NULL_BLOCK not in table[one.first_live(tokens) :], "the ticket names every live block"

    @rule(data=st.data(), tokens=st.integers(1, 9))
    def compute(self, data: st.DataObject, tokens: int) -> None:
        """One step. It takes its blocks, then its full ones are published, and those behind the window are freed."""
        if not self.running:
            return
        number = data.draw(st.sampled_from(sorted(self.running)))
        count, prefill, computed = self.running[number]
        holder, end = sequence(number), min(computed + min(tokens, self.chunk), prefill.tokens)
        if (reach := self.pools.reach(holder)) is not None:
            end = min(end, reach * SIZE, prefill.tokens - 1)
        assert end > computed or computed == prefill.tokens, "a prompt that has begun cannot go on"
        tables = self.pools.fill(holder, count if end == prefill.tokens else -(-end // SIZE))
        for one, table in zip(self.layouts, tables, strict=True):
            assert NULL_BLOCK not in table[one.first_live(computed) : -(-end // SIZE)], "a token without a block"
            assert end < prefill.tokens or NULL_BLOCK not in table[one.first_live(computed) :]
        for position in range(computed // SIZE, end // SIZE):
            self.pools.publish(holder, position, HASHES[position])
        self.pools.free_behind(holder, end)
        self.running[number] = (count, prefill, end)

    @rule(data=st.data(), withdraw=st.booleans())
    def end(self, data: st.DataObject, withdraw: bool) -> None:
        if self.running:
            number = data.draw(st.sampled_from(sorted(self.running)))
            full = self.running.pop(number)[2] // SIZE
            if withdraw:
                self.pools.withdraw(sequence(number), hashes=HASHES[:full])
            self.pools.drop(sequence(number))

    @rule()
    def return_lease(self) -> None:
        if self.lent:
            self.pools.drop(lease(self.lent.pop(0)))

    @rule(count=st.integers(1, 6), keep=st.booleans())
    def churn(self, count: int, keep: bool) -> None:
        """Somebody else takes what nobody was promised, which evicts cached blocks, and may keep it."""
        self.last += 1
        if self.pools.allocate(sequence(self.last), min(count, max(1, self.pools.num_allocatable))) is not None:
            self.others.append(self.last)
        while self.others and not keep:
            self.pools.drop(sequence(self.others.pop()))

    @invariant()
    def promises_can_be_kept(self) -> None:
        if hasattr(self, "pools"):
            self.pools.check_invariants()
            counts = self.pools.counts()
            assert counts.unaccounted == 0
            assert min(counts) >= 0

    def teardown(self) -> None:
        if not hasattr(self, "pools"):
            return
        for number in (*self.running, *self.others):
            self.pools.drop(sequence(number))
        while self.lent:
            self.return_lease()
        self.pools.check_invariants()
        counts = self.pools.counts()
        assert counts.free + counts.cached == counts.total


TestPromises = PromisesMachine.TestCase
TestPromises.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def _publish_at_once(self: WindowPool, holder: Holder, position: int, block_hash: BlockHash) -> None:
    super(WindowPool, self).publish(holder, position, block_hash)


def _smaller(name: str) -> Any:
    """Return the property, less two: the last block but one is needed only before the first output."""
    real = getattr(KvGroup, name)
    return property(lambda self: real.fget(self) - 2)


BROKEN = {
    "the promise is too small": (KvGroup, "least_promise", _smaller("least_promise")),
    "promised blocks are given away": (
        WindowPool,
        "num_allocatable",
        property(lambda self: len(self._free) + len(self._cached)),
    ),
    "blocks are shared while their places are promised": (WindowPool, "publish", _publish_at_once),
    "nothing is promised after a death": (WindowPool, "_promise", lambda self, holder: None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[name])
    found = settings(
        max_examples=3000,  # a promise that is too small takes 70 on average, and the search ends when it finds one
        stateful_step_count=25,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError, PdserveError)):
        run_state_machine_as_test(PromisesMachine, settings=found)


def test_a_prompt_that_is_computed_holds_its_window_and_a_chunk_and_leaves_the_rest() -> None:
    pools = BlockPools(12, 12, layouts=[layout(None), layout(3)])
    assert pools.reserve(sequence(1), 12, (), prefill=Prefill(24, 4)) is not None
    assert [pool.num_allocatable for pool in pools.groups] == [0, 12 - layout(3).least_promise]
    most = 0
    for computed in range(0, 24, 4):
        pools.fill(sequence(1), (computed + 4) // SIZE)
        most = max(most, sum(block != NULL_BLOCK for block in pools.blocks_of(sequence(1))[1]))
        pools.free_behind(sequence(1), computed + 4)
    assert most == 3 < layout(3).most_held(0, 12, 4), "each step ends with a block, which is not the worst case"
    assert pools.groups[1].counts().held == 1
