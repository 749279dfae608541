"""The block pools of one engine: a pool for each KV group. All groups have the same holders and lend, share and free together.

Block i of a holder holds the same tokens in every group. So a holder has equally many blocks in each group, and a prefix is
here only if every group has it. An operation succeeds in all groups or changes nothing.

A group with a sliding window holds only blocks that a later token can see (`KvGroup.first_live`). The entries before them
are null. So a hit of n blocks needs all n blocks in a group without a window, and the live ones of them in the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.block_hash import BlockHash
from pdserve.core.blocks import BlockCounts, BlockPool, Holder, SumBlocks
from pdserve.core.ids import NULL_BLOCK, BlockId, BlockSum, SeqId
from pdserve.core.kv_layout import KvGroup
from pdserve.core.prefix_keys import PublishedKeys

BlockTables = tuple[tuple[BlockId, ...], ...]
"""The blocks of a holder in each group, in prompt order. The groups come first. A dead block is `NULL_BLOCK`."""


@dataclass(frozen=True, slots=True)
class TableReservation:
    """A block table for each group. The first `hits` entries of each hold their KV already or are null: nobody may write
    them."""

    block_tables: BlockTables
    hits: int


class BlockPools:
    """The pools of all groups. The engine thread owns them. A `BlockPool` explains the operations."""

    def __init__(self, *num_blocks: int, layouts: Sequence[KvGroup] = ()) -> None:
        """Make a pool for each number of blocks. `layouts` describe the groups. Without them, no group has a window."""
        assert num_blocks
        assert len(layouts) in (0, len(num_blocks))
        self._windows = {index: layout for index, layout in enumerate(layouts) if layout.window is not None}
        self.published = PublishedKeys(len(num_blocks))
        self.groups = tuple(BlockPool(count, self.published) for count in num_blocks)
        self._only = self.groups[0] if len(self.groups) == 1 else None  # asked directly: a step grows many sequences

    @property
    def windowed(self) -> bool:
        """True when a group has a sliding window, so that blocks can die before their sequence ends."""
        return bool(self._windows)

    @property
    def num_blocks(self) -> int:
        """The blocks of the smallest group. A longer block table fits nobody."""
        return min([pool.num_blocks for pool in self.groups])

    @property
    def num_free(self) -> int:
        """The blocks that hold nothing of use, in the group that has the fewest."""
        return min([pool.num_free for pool in self.groups])

    @property
    def num_allocatable(self) -> int:
        """The blocks that can be allocated now in every group."""
        if self._only is not None:
            return self._only.num_allocatable
        return min([pool.num_allocatable for pool in self.groups])

    def allocate(self, holder: Holder, count: int) -> BlockTables | None:
        """Append `count` blocks of each group to the holder's tables. Return None and change nothing when a group has fewer."""
        if self._only is not None:
            blocks = self._only.allocate(holder, count)
            return None if blocks is None else (blocks,)
        if count > self.num_allocatable:
            return None
        taken = [pool.allocate(holder, count) for pool in self.groups]
        return tuple([blocks for blocks in taken if blocks is not None])

    def fits(self, count: int, hashes: Sequence[BlockHash] = (), *, spare: int = 0, arriving: int = 0) -> bool:
        """Tell whether `reserve` would succeed now and leave at least `spare` blocks of each group allocatable."""
        common = self._common(hashes, arriving)
        dead = self._dead(common, arriving)
        return all(pool.fits(count, common, spare=spare, dead=n) for pool, n in zip(self.groups, dead, strict=True))

    def reserve(self, holder: Holder, count: int, hashes: Sequence[BlockHash], *, arriving: int = 0) -> TableReservation | None:
        """Give `count` blocks of each group to a new holder. The longest prefix of `hashes` that every group has is shared.

        A peer computes the first `arriving` tokens, so the holder gets no blocks that are dead after them. Return None and
        change nothing when a group has not enough blocks. Raises `InternalBug` as `BlockPool.reserve` does.
        """
        common = self._common(hashes, arriving)
        dead = self._dead(common, arriving)
        if not all(pool.fits(count, common, dead=n) for pool, n in zip(self.groups[1:], dead[1:], strict=True)):
            return None
        first = self.groups[0].reserve(holder, count, common, dead=dead[0])
        if first is None:
            return None
        others = [pool.reserve(holder, count, common, dead=n) for pool, n in zip(self.groups[1:], dead[1:], strict=True)]
        found = [first, *[reservation for reservation in others if reservation is not None]]
        return TableReservation(tuple([reservation.block_ids for reservation in found]), first.hits)

    def free_behind(self, holder: Holder, computed: int) -> BlockTables | None:
        """Drop a sequence's references on the blocks that no token at position `computed` or after it sees. Return the new
        tables; None when nothing has changed. Raises `InternalBug` as `BlockPool.free_behind` does."""
        freed = [self.groups[i].free_behind(holder, layout.first_live(computed)) for i, layout in self._windows.items()]
        return self.blocks_of(holder) if any(freed) else None

    def publish(self, holder: Holder, position: int, block_hash: BlockHash) -> None:
        """Allow others to share the holder's blocks at `position`. Raises `InternalBug` as `BlockPool.publish` does."""
        for pool in self.groups:
            pool.publish(holder, position, block_hash)

    def withdraw(self, holder: Holder, first: int = 0, hashes: Sequence[BlockHash] | None = None) -> None:
        """Remove the hashes of the holder's blocks from position `first` on in all groups, also when one group is at fault.

        The groups of one token are computed from each other, so wrong content of one may have spoilt all. The holder's dead
        blocks may be cached: `hashes` are those of all its positions. None: they are not known, and groups with a window lose
        all hashes.
        """
        for pool in self.groups:
            pool.withdraw(holder, first)
        for index in self._windows:
            pool = self.groups[index]
            pool.withdraw_hashes(pool.hashes() if hashes is None else hashes[first:])

    def seal(self, block_ids: Sequence[BlockId], block_sums: Sequence[BlockSum]) -> None:
        """Store the checksum of one block of each group. Raises `InternalBug` as `BlockPool.seal` does."""
        for pool, block_id, block_sum in zip(self.groups, block_ids, block_sums, strict=True):
            pool.seal(block_id, block_sum)

    def seal_cached(self, sum_blocks: Sequence[SumBlocks]) -> None:
        """Store the checksum of each cached block that has none. `sum_blocks` has a function for each group."""
        for pool, of_group in zip(self.groups, sum_blocks, strict=True):
            pool.seal_cached(of_group)

    def sums_of(self, holder: Holder) -> tuple[tuple[BlockSum | None, ...], ...]:
        """Return the checksum of each of the holder's blocks in each group; see `BlockPool.sums_of`."""
        return tuple([pool.sums_of(holder) for pool in self.groups])

    def share(self, owner: Holder, other: Holder, tokens: int) -> BlockTables:
        """Give `other` its own reference on every block of `owner` that is live after the first `tokens` tokens.

        Return the tables of `other`. Raises `InternalBug` as `BlockPool.share` does.
        """
        dead = self.count_dead(tokens)
        return tuple([pool.share(owner, other, dead=n) for pool, n in zip(self.groups, dead, strict=True)])

    def hand_over(self, owner: Holder, other: Holder) -> None:
        """Move all references of `owner` to `other`. Raises `InternalBug` as `BlockPool.hand_over` does."""
        for pool in self.groups:
            pool.hand_over(owner, other)

    def drop(self, holder: Holder) -> None:
        """Drop all references of the holder. Idempotent."""
        for pool in self.groups:
            pool.drop(holder)

    def quarantine(self, seq_id: SeqId) -> None:
        """Set the fresh blocks of an aborted inbound sequence aside: a read of any group may still write them."""
        for pool in self.groups:
            pool.quarantine(seq_id)

    def end_quarantine(self, seq_id: SeqId) -> None:
        """Free the quarantined blocks of a sequence: the reads of all groups have stopped. Raises `InternalBug` if none."""
        for pool in self.groups:
            pool.end_quarantine(seq_id)

    def blocks_of(self, holder: Holder) -> BlockTables:
        """Return the holder's blocks in each group, dead ones as null entries; an unknown holder has none."""
        return tuple([pool.blocks_of(holder) for pool in self.groups])

    def count_dead(self, computed: int) -> list[int]:
        """Return how many first blocks of each group no token at position `computed` or after it sees."""
        dead = [0] * len(self.groups)
        for index, layout in self._windows.items():
            dead[index] = layout.first_live(computed)
        return dead

    def next_death(self, computed: int) -> int:
        """Return the number of computed tokens at which `free_behind` frees a further block of any group. Asserts that a group
        has a window."""
        return min([death for layout in self._windows.values() if (death := layout.next_death(computed)) is not None])

    def counts(self) -> BlockCounts:
        """Count the blocks of all groups together in each state."""
        return BlockCounts(*map(sum, zip(*[pool.counts() for pool in self.groups], strict=True)))

    def check_invariants(self) -> None:
        """Check each group, and that all have the same holders with equally many entries and hits. Raises AssertionError."""
        for pool in self.groups:
            pool.check_invariants()
            assert pool.holdings() == self.groups[0].holdings(), "two KV groups disagree about a holder"

    def _common(self, hashes: Sequence[BlockHash], arriving: int = 0) -> Sequence[BlockHash]:
        """Return the longest prefix of `hashes` of which every group has the live blocks. A single group without a window
        looks for it itself."""
        if not self._windows:
            if self._only is not None:
                return hashes
            return hashes[: min([len(pool.lookup(hashes)) for pool in self.groups])]
        whole = [len(pool.lookup(hashes)) for index, pool in enumerate(self.groups) if index not in self._windows]
        hashes = hashes[: min(whole, default=len(hashes))]
        runs = [(layout, self.groups[index].runs(hashes)) for index, layout in self._windows.items()]
        for count in range(len(hashes), 0, -1):
            if all(run[count] >= count - layout.first_live(max(arriving, count * layout.block_size)) for layout, run in runs):
                return hashes[:count]
        return ()

    def _dead(self, hits: Sequence[BlockHash], arriving: int) -> list[int]:
        """Return how many first blocks of each group are dead once these hits and the `arriving` tokens are here."""
        tokens = max([arriving, *[len(hits) * layout.block_size for layout in self._windows.values()]])
        return self.count_dead(tokens)


def count_blocks(block_tables: BlockTables) -> int:
    """Return the number of blocks in all tables together, without null entries."""
    return sum([len(table) - table.count(NULL_BLOCK) for table in block_tables])
