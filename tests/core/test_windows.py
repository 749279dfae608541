"""Blocks behind a sliding window: the pools hold what a later token sees, and nothing else, after every order of events.

The model of these tests says for each pair of positions whether one sees the other, and derives the rest by search.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from pdserve.core.block_hash import BlockHash
from pdserve.core.block_pools import BlockPools, count_blocks
from pdserve.core.blocks import BlockPool, BlockState, Holder
from pdserve.core.errors import InternalBug, PdserveError
from pdserve.core.ids import NULL_BLOCK, NULL_SUM, BlockSum
from pdserve.core.kv_layout import KvGroup
from tests.core.holders import inbound, lease, sequence
from tests.core.pool_history import PoolHistory

SIZE = 2
HASHES = [BlockHash(bytes([i]) * 32) for i in range(12)]
"""The hashes of one prompt's blocks. All sequences of these tests compute this prompt."""


def layout(window: int | None, block_size: int = SIZE) -> KvGroup:
    return KvGroup((0,), ((1, 2),), block_size, "float32", window)


def sees(query: int, key: int, window: int | None) -> bool:
    return key <= query and (window is None or key > query - window)


def is_live(block: int, computed: int, window: int | None, block_size: int = SIZE) -> bool:
    """Tell whether a token at `computed` or later sees a token of the block. One at a later position sees no older key."""
    keys = range(block * block_size, (block + 1) * block_size)
    return any(sees(query, key, window) for query in range(computed, computed + block_size + 1) for key in keys) or any(
        key >= computed for key in keys
    )


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 40))
def test_the_first_live_block_is_the_first_that_a_later_token_sees(window: int, block_size: int, computed: int) -> None:
    live = [block for block in range(60) if is_live(block, computed, window, block_size)]
    assert layout(window, block_size).first_live(computed) == live[0]
    assert layout(None, block_size).first_live(computed) == 0


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 40))
def test_the_next_death_is_when_the_first_live_block_changes(window: int, block_size: int, computed: int) -> None:
    one = layout(window, block_size)
    death = one.next_death(computed)
    assert death is not None
    assert death > computed
    assert one.first_live(death - 1) == one.first_live(computed) < one.first_live(death)
    assert layout(None, block_size).next_death(computed) is None


class WindowsMachine(PoolHistory):
    """Random histories over a group without a window, or none, and groups with windows of several sizes."""

    @initialize(
        windows=st.lists(st.sampled_from([None, None, 1, 2, 3, 5, 8]), min_size=1, max_size=3),
        sizes=st.tuples(*[st.integers(5, 16)] * 3),
    )
    def start(self, windows: list[int | None], sizes: tuple[int, int, int]) -> None:
        self.windows = windows
        self.begin(BlockPools(*sizes[: len(windows)], layouts=[layout(window) for window in windows]))

    def needed(self, blocks: int, computed: int) -> list[set[int]]:
        return [{b for b in range(blocks) if is_live(b, computed, window)} for window in self.windows]

    def longest_hit(self, full: int, arriving: int) -> int:
        """Search for the longest hit, by the definition."""
        for count in range(full, 0, -1):
            needed = self.needed(count, max(arriving, count * SIZE))
            pools = zip(self.pools.groups, needed, strict=True)
            if all(pool.lookup([HASHES[b]]) for pool, blocks in pools for b in blocks):
                return count
        return 0

    @rule(tokens=st.integers(1, 16), more=st.booleans(), pull=st.booleans(), cached=st.booleans())
    def reserve(self, tokens: int, more: bool, pull: bool, cached: bool) -> None:
        self.last += 1
        holder = inbound(self.last) if pull else sequence(self.last)
        count, arriving = -(-tokens // SIZE) + more, tokens if pull else 0
        hashes = HASHES[: (tokens if pull else tokens - 1) // SIZE] if cached else []
        hits = self.longest_hit(len(hashes), arriving)
        shortage, before = self.pools.shortage(count, hashes, arriving=arriving), self.pools.counts()
        room = self.pools.reserve(holder, count, hashes, arriving=arriving)
        assert (room is None) == (shortage is not None)
        if shortage is not None:
            assert self.pools.counts() == before
            free = [pool.num_allocatable for pool in self.pools.groups]
            assert shortage.blocks_needed > shortage.blocks_free == free[shortage.group]
            assert (shortage.window or None) == self.windows[shortage.group]
            fresh = [len(blocks) for blocks in self.needed(count, arriving)]
            assert hashes or shortage.blocks_needed == fresh[shortage.group]
            assert hashes or shortage.blocks_needed - shortage.blocks_free == max(map(int.__sub__, fresh, free))
            return
        assert room is not None
        assert room.hits == hits
        assert room.block_tables == self.pools.blocks_of(holder)
        if pull:
            self.pulling[self.last] = tokens
        else:
            self.running[self.last] = [count, hits * SIZE]

    @rule(data=st.data(), tokens=st.integers(1, 5), publish=st.booleans())
    def compute(self, data: st.DataObject, tokens: int, publish: bool) -> None:
        """One step: its blocks become full, and then those behind the window are freed."""
        if not self.running:
            return
        number = data.draw(st.sampled_from(sorted(self.running)))
        blocks, computed = self.running[number]
        end = min(computed + tokens, blocks * SIZE)
        if publish:
            for position in range(computed // SIZE, min(end // SIZE, len(HASHES))):
                self.pools.publish(sequence(number), position, HASHES[position])
        before = self.pools.blocks_of(sequence(number))
        tables = self.pools.free_behind(sequence(number), end)
        assert (tables is None) == (before == self.pools.blocks_of(sequence(number)))
        self.running[number][1] = end

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        if self.running:
            number = data.draw(st.sampled_from(sorted(self.running)))
            if self.pools.allocate(sequence(number), 1) is not None:
                self.running[number][0] += 1

    @rule(data=st.data(), short=st.integers(0, 1))
    def lend(self, data: st.DataObject, short: int) -> None:
        if left := sorted(self.running.keys() - self.lent.keys()):
            number = data.draw(st.sampled_from(left))
            blocks, computed = self.running[number]
            tokens = max(computed, blocks * SIZE - short)
            assert self.pools.share(sequence(number), lease(number), tokens) == self.pools.blocks_of(lease(number))
            self.lent[number] = tokens

    @rule(data=st.data(), withdraw=st.booleans())
    def end(self, data: st.DataObject, withdraw: bool) -> None:
        if self.running:
            number = data.draw(st.sampled_from(sorted(self.running)))
            full = self.running.pop(number)[1] // SIZE
            if withdraw:
                tables = self.pools.blocks_of(sequence(number))
                self.pools.withdraw(sequence(number), hashes=HASHES[:full])
                for pool, table in zip(self.pools.groups, tables, strict=True):
                    assert not {pool._block_with.get(one) for one in HASHES} & {*table} - {NULL_BLOCK}
                # Without windows, another sequence of the same prompt keeps the blocks that it has published.
                if any(window is not None for window in self.windows):
                    assert self.longest_hit(full, 0) == 0 or set(self.windows) == {1}, "a token of window 1 needs no other"
            self.pools.drop(sequence(number))

    def committed(self, number: int, tokens: int) -> None:
        for position in range(min(tokens // SIZE, len(HASHES))):
            self.pools.publish(sequence(number), position, HASHES[position])

    @invariant()
    def holders_have_what_a_later_token_sees(self) -> None:
        if not hasattr(self, "pools"):
            return
        self.pools.check_invariants()
        self.check({sequence(i): (blocks, computed) for i, (blocks, computed) in self.running.items()})
        self.check({inbound(i): (len(self.pools.blocks_of(inbound(i))[0]), n) for i, n in self.pulling.items()})
        self.check({lease(i): (len(self.pools.blocks_of(lease(i))[0]), n) for i, n in self.lent.items()})

    def check(self, holders: dict[Holder, tuple[int, int]]) -> None:
        for holder, (blocks, computed) in holders.items():
            tables = self.pools.blocks_of(holder)
            held = [{position for position, block in enumerate(table) if block != NULL_BLOCK} for table in tables]
            assert held == self.needed(blocks, computed)
            assert count_blocks(tables) == sum(map(len, held))
            for pool, table in zip(self.pools.groups, tables, strict=True):
                assert all(pool._states[b] is BlockState.HELD for b in table if b != NULL_BLOCK)


TestWindows = WindowsMachine.TestCase
TestWindows.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def _without_intersection(self: BlockPools, hashes: list[BlockHash], arriving: int = 0) -> list[BlockHash]:
    return hashes[: len(self.groups[0].lookup(hashes))]


BROKEN = {
    "one block too early": (
        KvGroup,
        "first_live",
        lambda self, n: max(0, n - (self.window or n) + 1 + SIZE) // self.block_size,
    ),
    "one token too late": (KvGroup, "first_live", lambda self, n: max(0, n - (self.window or n)) // self.block_size),
    "hits without intersection": (BlockPools, "_common", _without_intersection),
    "dead blocks are lent": (BlockPools, "count_dead", lambda self, computed: [0] * len(self.groups)),
    "dead blocks stay": (BlockPool, "free_behind", lambda self, holder, dead: False),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BROKEN[name])
    found = settings(max_examples=200, stateful_step_count=25, deadline=None, database=None, phases=[Phase.generate])
    with pytest.raises((AssertionError, PdserveError)):
        run_state_machine_as_test(WindowsMachine, settings=found)


def test_a_published_dead_block_is_cached_and_another_one_is_free() -> None:
    pools = BlockPools(6, 6, layouts=[layout(None), layout(2)])
    pools.allocate(sequence(1), 3)
    pools.publish(sequence(1), 0, HASHES[0])
    tables = pools.free_behind(sequence(1), 5)
    assert tables is not None
    assert tables[1][:2] == (NULL_BLOCK, NULL_BLOCK)
    assert NULL_BLOCK not in (*tables[0], tables[1][2])
    counts = [pool.counts() for pool in pools.groups]
    assert [(c.held, c.cached, c.free) for c in counts] == [(3, 0, 3), (1, 1, 4)]


def test_a_leased_block_that_dies_for_its_sequence_stays() -> None:
    pools = BlockPools(6, layouts=[layout(3)])
    pools.allocate(sequence(1), 3)
    lent = pools.share(sequence(1), lease(1), 5)
    assert lent[0][0] == NULL_BLOCK
    pools.free_behind(sequence(1), 6)
    assert pools.blocks_of(lease(1)) == lent
    assert pools.counts().held == 2


def test_only_the_blocks_of_a_sequence_are_freed_behind_the_window() -> None:
    pools = BlockPools(6, layouts=[layout(1)])
    pools.reserve(inbound(1), 2, ())
    with pytest.raises(InternalBug):
        pools.free_behind(inbound(1), 4)


def test_a_dead_block_is_summed_if_others_can_find_it() -> None:
    pools = BlockPools(6, layouts=[layout(2)])
    tables = pools.allocate(sequence(1), 3)
    assert tables is not None
    pools.publish(sequence(1), 0, HASHES[0])
    pools.free_behind(sequence(1), 6)
    for block in tables[0]:
        pools.seal((block,), (BlockSum(7),))
    assert pools.sums_of(sequence(1)) == ((NULL_SUM, NULL_SUM, 7),)
    pools.reserve(sequence(2), 2, HASHES[:1])
    assert pools.sums_of(sequence(2)) == ((7, None),)


def test_a_lease_whose_blocks_rotted_takes_the_hashes_of_dead_blocks_along() -> None:
    """Nobody knows which dead blocks were computed from the wrong one, so a group with a window loses all its hashes."""
    pools = BlockPools(6, 6, layouts=[layout(None), layout(2)])
    pools.allocate(sequence(1), 3)
    pools.share(sequence(1), lease(1), 6)
    for position in range(3):
        pools.publish(sequence(1), position, HASHES[position])
    pools.free_behind(sequence(1), 6)
    pools.withdraw(lease(1), 1)
    assert [len(pool.hashes()) for pool in pools.groups] == [1, 0]
    pools.check_invariants()
