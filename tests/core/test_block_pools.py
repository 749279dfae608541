"""Pools of several KV groups: they agree about every holder after every order of events, and act all at once."""

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test

from pdserve.core.block_hash import BlockHash
from pdserve.core.block_pools import BlockPools
from pdserve.core.blocks import BlockCounts
from pdserve.core.errors import InternalBug
from pdserve.core.ids import BlockSum, SeqId
from pdserve.core.kv_layout import Shortage
from tests.core.holders import inbound, lease, sequence
from tests.core.pool_history import PoolHistory

HASHES = [BlockHash(bytes([i]) * 32) for i in range(12)]


def published(pools: BlockPools, number: int, count: int) -> None:
    """Compute a prompt of `count` blocks, publish them, and leave them cached."""
    assert pools.reserve(sequence(number), count, ()) is not None
    for position in range(count):
        pools.publish(sequence(number), position, HASHES[position])
    pools.drop(sequence(number))


def test_a_prefix_is_here_only_if_every_group_has_it():
    """(1) Both groups have three blocks of a prefix; (2) the smaller one evicts the last; (3) only two are shared."""
    pools = BlockPools(8, 5)
    published(pools, 1, 3)
    assert pools.allocate(sequence(2), 3) is not None
    assert [len(pool.lookup(HASHES[:3])) for pool in pools.groups] == [3, 2]
    pools.drop(sequence(2))
    found = pools.reserve(sequence(3), 3, HASHES[:3])
    assert found is not None
    assert found.hits == 2
    pools.check_invariants()


def test_what_one_group_cannot_hold_no_group_takes():
    pools = BlockPools(8, 2)
    before = pools.counts()
    assert pools.allocate(sequence(1), 3) is None
    assert pools.reserve(sequence(1), 3, ()) is None
    assert pools.shortage(3) == Shortage(1, 3, 2)
    assert pools.shortage(1, spare=2) == Shortage(1, 3, 2)
    assert pools.shortage(1, spare=(8, 0)) == Shortage(0, 9, 8)
    assert pools.shortage(10) == Shortage(1, 10, 2), "it lacks eight blocks, and the other group two"
    assert pools.shortage(2) is None
    assert pools.counts() == before
    assert (pools.num_blocks, pools.num_free, pools.num_allocatable) == (2, 2, 2)


def test_counts_are_those_of_all_groups():
    pools = BlockPools(8, 5)
    pools.allocate(sequence(1), 2)
    assert pools.counts() == BlockCounts(13, 9, 0, 4, 0)


def test_the_fresh_blocks_of_every_group_are_quarantined_until_all_reads_have_stopped():
    pools = BlockPools(8, 5)
    pools.reserve(inbound(1), 2, ())
    pools.quarantine(SeqId(1))
    assert pools.counts().quarantined == 4
    pools.end_quarantine(SeqId(1))
    assert pools.counts().free == 13


def test_each_group_has_checksums_of_its_own():
    pools = BlockPools(8, 5)
    tables = pools.allocate(sequence(1), 2)
    assert tables is not None
    first = [table[0] for table in tables]
    pools.seal(first, (BlockSum(7), BlockSum(8)))
    assert pools.sums_of(sequence(1)) == ((7, None), (8, None))
    with pytest.raises(InternalBug):
        pools.seal(first, (BlockSum(7), BlockSum(8)))


def test_groups_that_disagree_are_noticed():
    pools = BlockPools(8, 5)
    pools.allocate(sequence(1), 2)
    pools.groups[1].drop(sequence(1))
    with pytest.raises(AssertionError, match="disagree"):
        pools.check_invariants()


class PoolsMachine(PoolHistory):
    """Random histories over three groups of different sizes, so that their caches differ."""

    @initialize(sizes=st.tuples(st.integers(4, 16), st.integers(4, 8), st.integers(4, 12)))
    def start(self, sizes: tuple[int, int, int]) -> None:
        self.begin(BlockPools(*sizes))

    @rule(count=st.integers(1, 6), full=st.integers(0, 6), pull=st.booleans())
    def reserve(self, count: int, full: int, pull: bool) -> None:
        self.last += 1
        hashes = HASHES[: min(count, full)]
        here = min(len(pool.lookup(hashes)) for pool in self.pools.groups)
        fits, before = self.pools.shortage(count, hashes) is None, self.pools.counts()
        room = self.pools.reserve(inbound(self.last) if pull else sequence(self.last), count, hashes)
        assert (room is not None) == fits
        if room is None:
            assert self.pools.counts() == before
            return
        assert room.hits == here, "the longest prefix that every group has"
        assert {len(table) for table in room.block_tables} == {count}
        if pull:
            self.pulling[self.last] = 0
        else:
            self.running[self.last] = [count, 0]

    @rule(data=st.data(), full=st.integers(0, 6))
    def publish(self, data: st.DataObject, full: int) -> None:
        if self.running:
            number = data.draw(st.sampled_from(sorted(self.running)))
            for position in range(min(full, self.running[number][0])):
                self.pools.publish(sequence(number), position, HASHES[position])

    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        if self.running:
            number = data.draw(st.sampled_from(sorted(self.running)))
            if self.pools.num_allocatable:
                assert self.pools.allocate(sequence(number), 1) is not None
                self.running[number][0] += 1
            else:
                assert self.pools.allocate(sequence(number), 1) is None

    @rule(data=st.data())
    def lend(self, data: st.DataObject) -> None:
        if left := sorted(self.running.keys() - self.lent.keys()):
            number = data.draw(st.sampled_from(left))
            assert self.pools.share(sequence(number), lease(number), 0) == self.pools.blocks_of(sequence(number))
            self.lent[number] = 0

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.running:
            number = data.draw(st.sampled_from(sorted(self.running)))
            del self.running[number]
            self.pools.drop(sequence(number))

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.running:
            self.pools.withdraw(sequence(data.draw(st.sampled_from(sorted(self.running)))))

    @invariant()
    def groups_agree(self) -> None:
        if hasattr(self, "pools"):
            self.pools.check_invariants()


TestPools = PoolsMachine.TestCase
TestPools.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


BROKEN = {
    "the first group is dropped": ("drop", lambda self, holder: self.groups[0].drop(holder)),
    "the first group is quarantined": ("quarantine", lambda self, seq_id: self.groups[0].quarantine(seq_id)),
    "the first group is counted": ("num_allocatable", property(lambda self: self.groups[0].num_allocatable)),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_group_that_is_forgotten_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPools, *BROKEN[name])
    found = settings(max_examples=300, stateful_step_count=30, deadline=None, database=None, phases=[Phase.generate])
    with pytest.raises((AssertionError, InternalBug)):
        run_state_machine_as_test(PoolsMachine, settings=found)


def test_hits_of_the_first_group_alone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPools, "_common", lambda self, hashes, _: hashes[: len(self.groups[0].lookup(hashes))])
    with pytest.raises(AssertionError):
        test_a_prefix_is_here_only_if_every_group_has_it()
