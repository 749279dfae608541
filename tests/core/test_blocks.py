"""The block pool: conservation under every order of events, on a pool of ten blocks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.core.blocks import BlockPool, Holder, HolderKind
from pdserve.core.errors import InternalBug
from pdserve.core.ids import SeqId
from tests.core.holders import inbound, lease, sequence


def test_allocation_is_all_or_nothing():
    pool = BlockPool(4)
    assert pool.allocate(sequence(1), 3) is not None
    assert pool.allocate(sequence(2), 2) is None
    assert pool.num_free == 1
    assert pool.blocks_of(sequence(2)) == ()


def test_a_lent_block_is_free_only_when_both_holders_have_dropped_it():
    pool = BlockPool(4)
    pool.allocate(sequence(1), 2)
    pool.share(sequence(1), lease(1))
    pool.drop(sequence(1))
    assert pool.num_free == 2
    pool.drop(lease(1))
    pool.drop(lease(1))
    assert pool.num_free == 4


def test_a_quarantined_block_is_not_lent_to_the_next_request():
    pool = BlockPool(2)
    pool.allocate(inbound(1), 2)
    pool.quarantine(SeqId(1))
    assert pool.allocate(inbound(2), 1) is None
    assert pool.counts().quarantined == 2
    pool.end_quarantine(SeqId(1))
    assert pool.allocate(inbound(2), 2) is not None


def test_inbound_blocks_can_be_handed_over_but_not_shared():
    pool = BlockPool(2)
    pool.allocate(inbound(1), 2)
    with pytest.raises(InternalBug):
        pool.share(inbound(1), lease(1))
    pool.hand_over(inbound(1), sequence(1))
    assert pool.blocks_of(inbound(1)) == ()
    assert len(pool.blocks_of(sequence(1))) == 2


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10)
        self.quarantined: list[int] = []
        self.next_id = 0

    def holding(self, kind: HolderKind) -> list[Holder]:
        return [Holder(kind, SeqId(i)) for i in range(self.next_id) if self.pool.blocks_of(Holder(kind, SeqId(i)))]

    @rule(count=st.integers(1, 5), kind=st.sampled_from([HolderKind.SEQUENCE, HolderKind.INBOUND]))
    def allocate(self, count, kind):
        free = self.pool.num_free
        holder = Holder(kind, SeqId(self.next_id))
        self.next_id += 1
        blocks = self.pool.allocate(holder, count)
        assert (blocks is None) == (count > free)
        assert self.pool.num_free == (free if blocks is None else free - count)

    @rule(i=st.integers(0, 9))
    def lend(self, i):
        owners = [h for h in self.holding(HolderKind.SEQUENCE) if not self.pool.blocks_of(lease(h.seq_id))]
        if owners:
            owner = owners[i % len(owners)]
            assert self.pool.share(owner, lease(owner.seq_id)) == self.pool.blocks_of(owner)

    @rule(i=st.integers(0, 9), kind=st.sampled_from(HolderKind))
    def drop(self, i, kind):
        if holders := self.holding(kind):
            self.pool.drop(holders[i % len(holders)])

    @rule(i=st.integers(0, 9))
    def commit(self, i):
        if holders := self.holding(HolderKind.INBOUND):
            holder = holders[i % len(holders)]
            self.pool.hand_over(holder, sequence(holder.seq_id))

    @rule(i=st.integers(0, 9))
    def abort_while_reading(self, i):
        if holders := self.holding(HolderKind.INBOUND):
            holder = holders[i % len(holders)]
            self.pool.quarantine(holder.seq_id)
            self.quarantined.append(holder.seq_id)

    @rule(i=st.integers(0, 9))
    def read_stopped(self, i):
        if self.quarantined:
            self.pool.end_quarantine(SeqId(self.quarantined.pop(i % len(self.quarantined))))

    @invariant()
    def conserved(self):
        self.pool.check_invariants()
        counts = self.pool.counts()
        assert counts.unaccounted == 0
        assert counts.free == self.pool.num_free


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
