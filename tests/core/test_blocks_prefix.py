"""Prefix sharing in the block pool: who may find a block, and when it may be written again."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pdserve.core.block_hash import BlockHash
from pdserve.core.blocks import TRANSITIONS, BlockEvent, BlockPool, BlockState, Holder, HolderKind
from pdserve.core.errors import IllegalTransition, InternalBug
from pdserve.core.ids import BlockId, BlockSum, SeqId
from tests.core.holders import inbound, lease, sequence

A, B, C = (BlockHash(name) for name in (b"a", b"b", b"c"))


def with_prefix(num_blocks: int, *hashes: BlockHash) -> BlockPool:
    """A pool in which an earlier sequence has left a prefix behind."""
    pool = BlockPool(num_blocks)
    pool.allocate(sequence(0), len(hashes))
    for position, block_hash in enumerate(hashes):
        pool.publish(sequence(0), position, block_hash)
    pool.drop(sequence(0))
    pool.check_invariants()
    return pool


def test_a_published_block_is_cached_when_dropped_and_found_by_its_hash():
    pool = with_prefix(4, A, B)
    assert (pool.num_free, pool.counts().cached, pool.num_allocatable) == (2, 2, 4)
    found = pool.reserve(sequence(1), 3, (A, B))
    assert found is not None
    assert found.hits == 2
    assert found.block_ids[:2] == (0, 1)
    assert pool.counts().cached == 0


def test_a_prefix_with_a_hole_is_found_up_to_the_hole():
    pool = with_prefix(4, A, B)
    assert len(pool.lookup((A, C, B))) == 1
    assert pool.lookup((C, A)) == ()


def test_a_reservation_that_does_not_fit_pins_no_hits():
    pool = with_prefix(3, A, B)
    pool.allocate(sequence(1), 1)
    assert pool.reserve(sequence(2), 3, (A, B)) is None, "one fresh block is needed and only the hits could be evicted"
    assert pool.counts().cached == 2
    assert pool.blocks_of(sequence(2)) == ()
    pool.check_invariants()


def test_a_referenced_block_is_never_evicted():
    pool = with_prefix(3, A, B)
    reserved = pool.reserve(inbound(1), 1, (A,))
    assert reserved is not None
    assert pool.allocate(sequence(2), 3) is None
    assert pool.allocate(sequence(2), 2) is not None
    assert pool.lookup((A,)) == reserved.block_ids
    assert pool.lookup((A, B)) == reserved.block_ids, "what was evicted is no longer found"


def test_the_least_recently_used_end_of_a_prefix_is_evicted_first():
    pool = with_prefix(3, A, B, C)
    pool.allocate(sequence(1), 1)
    assert len(pool.lookup((A, B, C))) == 2


def test_hits_of_an_aborted_inbound_are_dropped_and_only_its_fresh_blocks_quarantined():
    pool = with_prefix(3, A)
    pool.reserve(inbound(1), 3, (A,))
    pool.quarantine(SeqId(1))
    assert (pool.counts().cached, pool.counts().quarantined) == (1, 2)
    assert len(pool.lookup((A,))) == 1, "nobody wrote it"
    pool.end_quarantine(SeqId(1))
    assert pool.num_allocatable == 3


def test_a_hit_that_another_sequence_drops_stays_with_the_inbound_and_then_with_its_sequence():
    pool = with_prefix(3, A)
    pool.reserve(sequence(1), 1, (A,))
    pool.reserve(inbound(2), 2, (A,))
    pool.drop(sequence(1))
    assert pool.counts().cached == 0
    pool.hand_over(inbound(2), sequence(2))
    pool.publish(sequence(2), 1, B)
    pool.drop(sequence(2))
    assert len(pool.lookup((A, B))) == 2


def test_withdrawn_blocks_are_found_by_nobody_and_stay_with_who_holds_them():
    pool = with_prefix(5, A, B)
    pool.reserve(sequence(1), 3, (A, B))
    pool.reserve(inbound(2), 3, (A, B))
    pool.withdraw(sequence(1))
    pool.check_invariants()
    assert pool.lookup((A, B)) == ()
    pool.drop(sequence(1))
    assert (pool.counts().held, pool.counts().cached) == (3, 0)
    pool.quarantine(SeqId(2))
    assert (pool.counts().quarantined, pool.num_free) == (1, 4), "no read was asked to write its hits, published or not"
    pool.check_invariants()


def test_blocks_that_a_read_may_write_cannot_be_published():
    pool = BlockPool(2)
    pool.allocate(inbound(1), 2)
    with pytest.raises(InternalBug, match="inbound 1"):
        pool.publish(inbound(1), 0, A)
    pool.quarantine(SeqId(1))
    with pytest.raises(InternalBug):
        pool.publish(sequence(1), 0, A)


def test_a_lease_may_not_publish_what_it_only_references():
    pool = BlockPool(1)
    pool.allocate(sequence(1), 1)
    pool.share(sequence(1), lease(1))
    with pytest.raises(InternalBug, match="lease 1"):
        pool.publish(lease(1), 0, A)


def test_of_two_blocks_with_the_same_content_the_first_is_found():
    pool = with_prefix(3, A)
    pool.allocate(sequence(1), 1)
    pool.publish(sequence(1), 0, A)
    assert pool.lookup((A,)) == (0,)
    pool.drop(sequence(1))
    assert (pool.num_free, pool.counts().cached) == (2, 1)


def test_a_block_cannot_be_published_as_two_things():
    pool = BlockPool(1)
    pool.allocate(sequence(1), 1)
    pool.publish(sequence(1), 0, A)
    pool.publish(sequence(1), 0, A)
    with pytest.raises(InternalBug, match="published as"):
        pool.publish(sequence(1), 0, B)


def test_an_illegal_move_names_the_holder_and_what_went_before():
    pool = BlockPool(2)
    pool.allocate(sequence(7), 1)
    with pytest.raises(IllegalTransition, match=r"held by \(sequence 7\).*sequence 7: allocate 1"):
        pool._move(BlockId(0), BlockEvent.TAKE)
    with pytest.raises(InternalBug, match="nothing in quarantine"):
        pool.end_quarantine(SeqId(7))


def test_no_state_of_a_block_is_a_dead_end():
    for state in BlockState:
        assert any(source is state and target is not state for (source, _), target in TRANSITIONS.items())


def test_a_checksum_is_set_once_lives_with_its_block_and_is_inherited():
    """(1) Set by the lease, as its sequence may have ended; (2) cached and held again; (3) gone when the block is taken."""
    pool = BlockPool(2)
    pool.allocate(sequence(1), 1)
    pool.publish(sequence(1), 0, A)
    pool.share(sequence(1), lease(1))
    assert pool.sums_of(lease(1)) == (None,)
    pool.drop(sequence(1))
    (block,) = pool.blocks_of(lease(1))
    pool.seal(block, BlockSum(5))
    with pytest.raises(InternalBug, match="has its checksum already"):
        pool.seal(block, BlockSum(5))
    pool.drop(lease(1))
    pool.reserve(sequence(2), 1, [A])
    assert pool.sums_of(sequence(2)) == (BlockSum(5),)
    pool.drop(sequence(2))
    pool.allocate(sequence(3), 2)
    assert pool.sums_of(sequence(3)) == (None, None)


def test_only_cached_blocks_without_a_checksum_are_summed_when_a_worker_begins_to_lend():
    pool = with_prefix(4, A, B)
    pool.reserve(sequence(1), 1, [A])
    pool.seal(pool.blocks_of(sequence(1))[0], BlockSum(5))
    pool.drop(sequence(1))
    asked: list[BlockId] = []

    def sums(blocks):
        asked.extend(blocks)
        return tuple(BlockSum(100 + block) for block in blocks)

    pool.seal_cached(sums)
    pool.seal_cached(sums)
    assert asked == [1], "each block is summed once, and free ones never"
    pool.reserve(sequence(2), 2, [A, B])
    assert pool.sums_of(sequence(2)) == (5, 101)


def test_what_a_peer_is_read_into_is_not_summed_here():
    """It is in the peer's form until it is converted; who lends it on sums it then, once it is its own."""
    pool = BlockPool(1)
    (block,) = pool.allocate(inbound(1), 1)
    with pytest.raises(InternalBug, match="not a step's"):
        pool.seal(block, BlockSum(5))
    pool.hand_over(inbound(1), sequence(1))
    pool.seal(block, BlockSum(5))


def test_withdrawn_blocks_are_found_by_nobody_and_kept_by_their_holders():
    pool = BlockPool(4)
    pool.allocate(sequence(1), 3)
    for position, name in enumerate((A, B, C)):
        pool.publish(sequence(1), position, name)
    held = pool.share(sequence(1), lease(1))
    pool.withdraw(lease(1), 1)
    assert pool.lookup([A, B, C]) == held[:1]
    assert pool.blocks_of(sequence(1)) == held
    pool.check_invariants()
    pool.withdraw(lease(1), 1)
    for holder in (sequence(1), lease(1)):
        pool.drop(holder)
    assert pool.counts().cached == 1
    pool.check_invariants()


class PrefixMachine(RuleBasedStateMachine):
    """Random holders of prompts over two tokens, beside a naive model: which content each block has, and who holds it.

    The model knows no free list, no hash index and no order of eviction. It only knows what must hold: a hit has the
    content asked for, and a block changes its content only while nobody else holds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(8)
        self.content: dict[int, bytes] = {}  # of blocks that are final
        self.held: dict[Holder, tuple[int, ...]] = {}
        self.hits: dict[Holder, int] = {}
        self.prompts: dict[SeqId, tuple[bytes, ...]] = {}
        self.quarantined: dict[SeqId, tuple[int, ...]] = {}
        self.next_id = 0

    def referenced(self) -> set[int]:
        blocks = [*self.held.values(), *self.quarantined.values()]
        return {block for ids in blocks for block in ids}

    def pick(self, kind: HolderKind, i: int) -> Holder | None:
        holders = [holder for holder in self.held if holder.kind is kind]
        return holders[i % len(holders)] if holders else None

    @rule(
        prompt=st.lists(st.sampled_from([b"x", b"y"]), min_size=1, max_size=4),
        kind=st.sampled_from([HolderKind.SEQUENCE, HolderKind.INBOUND]),
        growth=st.integers(0, 1),
    )
    def reserve(self, prompt, kind, growth):
        holder = Holder(kind, SeqId(self.next_id))
        self.next_id += 1
        names = tuple(b"".join(prompt[: i + 1]) for i in range(len(prompt)))
        hashes = tuple(BlockHash(name) for name in names)
        count = len(prompt) + growth
        before = self.pool.counts()
        reserved = self.pool.reserve(holder, count, hashes)
        if reserved is None:
            assert self.pool.counts() == before
            hits = self.pool.lookup(hashes)
            unheld = 8 - len(self.referenced() | set(hits))
            assert count - len(hits) > unheld, "there was room"
            return
        fresh = reserved.block_ids[reserved.hits :]
        assert not set(fresh) & self.referenced(), "a block was taken from its holder"
        assert [self.content[b] for b in reserved.block_ids[: reserved.hits]] == list(names[: reserved.hits])
        for block in fresh:
            self.content.pop(block, None)
        self.held[holder] = reserved.block_ids
        self.hits[holder] = reserved.hits
        self.prompts[holder.seq_id] = names

    @rule(i=st.integers(0, 9), publish=st.booleans())
    def compute(self, i, publish):
        """A sequence's step was collected: all its prompt's blocks are final, and shared or not."""
        if holder := self.pick(HolderKind.SEQUENCE, i):
            for position, name in enumerate(self.prompts[holder.seq_id]):
                self.content[self.held[holder][position]] = name
                if publish:
                    self.pool.publish(holder, position, BlockHash(name))

    @rule(i=st.integers(0, 9))
    def withdraw(self, i):
        """What it holds may be wrong: from now on nobody may get any of it as a hit, as long as it is not published anew."""
        if holder := self.pick(HolderKind.SEQUENCE, i):
            self.pool.withdraw(holder)
            names = self.prompts[holder.seq_id]
            found = self.pool.lookup([BlockHash(name) for name in names])
            assert not set(found) & set(self.held[holder])

    @rule(i=st.integers(0, 9))
    def lend(self, i):
        holder = self.pick(HolderKind.SEQUENCE, i)
        if holder and lease(holder.seq_id) not in self.held:
            self.held[lease(holder.seq_id)] = self.pool.share(holder, lease(holder.seq_id))

    @rule(i=st.integers(0, 9), kind=st.sampled_from(HolderKind))
    def drop(self, i, kind):
        if holder := self.pick(kind, i):
            self.pool.drop(holder)
            self.pool.drop(holder)
            del self.held[holder]

    @rule(i=st.integers(0, 9))
    def commit(self, i):
        if holder := self.pick(HolderKind.INBOUND, i):
            self.pool.hand_over(holder, sequence(holder.seq_id))
            self.held[sequence(holder.seq_id)] = self.held.pop(holder)

    @rule(i=st.integers(0, 9))
    def abort_while_reading(self, i):
        if holder := self.pick(HolderKind.INBOUND, i):
            self.pool.quarantine(holder.seq_id)
            self.quarantined[holder.seq_id] = self.held.pop(holder)[self.hits[holder] :]

    @rule(i=st.integers(0, 9))
    def read_stopped(self, i):
        if self.quarantined:
            seq_id = list(self.quarantined)[i % len(self.quarantined)]
            self.pool.end_quarantine(seq_id)
            del self.quarantined[seq_id]

    @invariant()
    def books_agree(self):
        self.pool.check_invariants()
        counts = self.pool.counts()
        assert counts.unaccounted == 0
        assert counts.held + counts.quarantined == len(self.referenced())
        assert counts.quarantined == sum(map(len, self.quarantined.values()))
        assert self.pool.num_allocatable == 8 - len(self.referenced())
        for holder, blocks in self.held.items():
            assert self.pool.blocks_of(holder) == blocks

    def teardown(self):
        """Whoever is left lets go, and every block can be had again."""
        for holder in self.held:
            self.pool.drop(holder)
        for seq_id in self.quarantined:
            self.pool.end_quarantine(seq_id)
        assert self.pool.allocate(sequence(-1), 8) is not None


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
