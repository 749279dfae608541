"""The block pools of one engine: a pool for each KV group. All groups have the same holders and lend, share and free together.

Block i of a holder holds the same tokens in every group. So a holder has equally many blocks in each group, and a prefix is
here only if every group has it. An operation succeeds in all groups or changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.core.block_hash import BlockHash
from pdserve.core.blocks import BlockCounts, BlockPool, Holder
from pdserve.core.ids import BlockId, BlockSum, SeqId
from pdserve.core.prefix_keys import PublishedKeys

BlockTables = tuple[tuple[BlockId, ...], ...]
"""The blocks of a holder in each group, in prompt order. The groups come first."""


@dataclass(frozen=True, slots=True)
class TableReservation:
    """A block table for each group. The first `hits` blocks of each hold their KV already: nobody may write them."""

    block_tables: BlockTables
    hits: int


class BlockPools:
    """The pools of all groups. The engine thread owns them. A `BlockPool` explains the operations."""

    def __init__(self, *num_blocks: int) -> None:
        """Make a pool for each number of blocks."""
        assert num_blocks
        self.published = PublishedKeys(len(num_blocks))
        self.groups = tuple(BlockPool(count, self.published) for count in num_blocks)
        self._only = self.groups[0] if len(self.groups) == 1 else None  # asked directly: a step grows many sequences

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

    def fits(self, count: int, hashes: Sequence[BlockHash] = (), *, spare: int = 0) -> bool:
        """Tell whether `reserve` would succeed now and leave at least `spare` blocks of each group allocatable."""
        common = self._common(hashes)
        return all(pool.fits(count, common, spare=spare) for pool in self.groups)

    def reserve(self, holder: Holder, count: int, hashes: Sequence[BlockHash]) -> TableReservation | None:
        """Give `count` blocks of each group to a new holder. The longest prefix of `hashes` that every group has is shared.

        Return None and change nothing when a group has not enough blocks. Raises `InternalBug` as `BlockPool.reserve` does.
        """
        common = self._common(hashes)
        if not all(pool.fits(count, common) for pool in self.groups[1:]):
            return None
        first = self.groups[0].reserve(holder, count, common)
        if first is None:
            return None
        others = [pool.reserve(holder, count, common) for pool in self.groups[1:]]
        found = [first, *[reservation for reservation in others if reservation is not None]]
        return TableReservation(tuple([reservation.block_ids for reservation in found]), first.hits)

    def publish(self, holder: Holder, position: int, block_hash: BlockHash) -> None:
        """Allow others to share the holder's blocks at `position`. Raises `InternalBug` as `BlockPool.publish` does."""
        for pool in self.groups:
            pool.publish(holder, position, block_hash)

    def withdraw(self, holder: Holder, first: int = 0) -> None:
        """Remove the hashes of the holder's blocks from position `first` on in all groups, also when one group is at fault.

        The groups of one token are computed from each other, so wrong content of one may have spoilt all.
        """
        for pool in self.groups:
            pool.withdraw(holder, first)

    def seal(self, holder: Holder, position: int, block_sums: Sequence[BlockSum]) -> None:
        """Store the checksum of each group's block at `position`. Raises `InternalBug` as `BlockPool.seal` does."""
        for pool, block_sum in zip(self.groups, block_sums, strict=True):
            pool.seal(holder, position, block_sum)

    def sums_of(self, holder: Holder) -> tuple[tuple[BlockSum | None, ...], ...]:
        """Return the checksum of each of the holder's blocks in each group. None stands for a block without one yet."""
        return tuple([pool.sums_of(holder) for pool in self.groups])

    def share(self, owner: Holder, other: Holder) -> BlockTables:
        """Give `other` its own reference on every block of `owner`. Raises `InternalBug` as `BlockPool.share` does."""
        return tuple([pool.share(owner, other) for pool in self.groups])

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
        """Return the holder's blocks in each group; an unknown holder has none."""
        return tuple([pool.blocks_of(holder) for pool in self.groups])

    def counts(self) -> BlockCounts:
        """Count the blocks of all groups together in each state."""
        return BlockCounts(*map(sum, zip(*[pool.counts() for pool in self.groups], strict=True)))

    def check_invariants(self) -> None:
        """Check each group, and that all have the same holders with equally many blocks and hits. Raises AssertionError."""
        for pool in self.groups:
            pool.check_invariants()
            assert pool.holdings() == self.groups[0].holdings(), "two KV groups disagree about a holder"

    def _common(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Return the longest prefix of `hashes` that every group has. With one group, the group looks for it itself."""
        if self._only is not None:
            return hashes
        return hashes[: min([len(pool.lookup(hashes)) for pool in self.groups])]
