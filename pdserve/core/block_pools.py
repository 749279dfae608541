"""The block pools of one engine: a pool for each KV group. All groups have the same holders and lend, share and free together.

Block i of a holder holds the same tokens in every group. So a holder has equally many blocks in each group, and a prefix is
cached only if every group has it. An operation succeeds in all groups or changes nothing.

A group with a sliding window holds only blocks that a later token can see (`KvGroup.first_live`). The entries before them are
null. So a hit of n blocks needs all n blocks in a group without a window, and only the live blocks among them in the other
groups. A prompt that is computed takes its blocks there chunk by chunk (`WindowPool`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pdserve.core.block_hash import BlockHash, PublishedKeys
from pdserve.core.blocks import BlockCounts, BlockPool, Holder, Reservation, SumBlocks
from pdserve.core.ids import NULL_BLOCK, BlockId, BlockSum, SeqId
from pdserve.core.kv_layout import KvGroup, Shortage

BlockTables = tuple[tuple[BlockId, ...], ...]
"""The blocks of a holder in each group, in prompt order. The groups come first. The entry of a dead block is `NULL_BLOCK`, and
so is the entry of a block that is not taken yet."""


@dataclass(frozen=True, slots=True)
class TableReservation:
    """A block table for each group. The first `hits` entries of each hold their KV already or are null: nobody may write
    them."""

    block_tables: BlockTables
    hits: int


class Prefill(NamedTuple):
    """A prompt that is computed here. `chunk`: the most tokens of the prompt that a step computes. `lent`: a lease keeps the
    blocks that are live at the prompt's end."""

    tokens: int
    chunk: int
    lent: bool = False


@dataclass(slots=True)
class _Gap:
    """The entries [begin, end) of a table that are not taken yet. The blocks before entry `first` were in the pool when the
    table was made."""

    first: int
    begin: int
    end: int
    most: int
    """The number of blocks that the pool promises at once to the entries from `first` on."""
    promised: int = 0
    """The promised blocks that are not taken now. No other holder gets them."""
    unpublished: dict[int, BlockHash] = field(default_factory=dict)


class WindowPool(BlockPool):
    """The pool of a group with a sliding window. A prompt that is computed takes its blocks chunk by chunk, while blocks behind
    the window come back. So its table has a gap: null entries for blocks that are not taken yet.

    The pool promises each such holder enough blocks for the window and a step of one block, so the prompt always goes on. A
    larger step takes blocks that are not promised. Its blocks are published when they die, or when the last block of the table
    is taken. Until then no other holder has them, so a dead block really comes back to the pool.
    """

    def __init__(self, num_blocks: int, layout: KvGroup, published: PublishedKeys | None = None) -> None:
        super().__init__(num_blocks, published)
        self._layout = layout
        self._gaps: dict[Holder, _Gap] = {}
        self._promised = 0

    @property
    def num_allocatable(self) -> int:
        """The blocks that can be allocated now and are not promised."""
        return super().num_allocatable - self._promised

    def counts(self) -> BlockCounts:
        """Count the blocks in each state. Promised blocks count as held."""
        total, free, cached, held, quarantined = super().counts()
        from_free = min(free, self._promised)
        rest = self._promised - from_free
        return BlockCounts(total, free - from_free, cached - rest, held + self._promised, quarantined)

    def blocks_needed(self, count: int, prefill: Prefill, hits: int = 0, live_hits: int = 0) -> int:
        """Return the number of blocks that a table of `count` blocks needs which begins with `hits` hits, `live_hits` of them
        live: the blocks that a lease keeps, and the blocks that steps of the largest size hold at once. If the pool is too
        small for such steps, these are the blocks that a lease keeps and the promised blocks."""
        end = self._end_of_gap(count, prefill, hits)
        least = count - end + self._promise_for(end - hits)
        needed = max(least, count - end + self._layout.most_held(hits, end, prefill.chunk))
        return needed if needed + live_hits <= self.num_blocks else least

    def lacking_for(self, count: int, hashes: Sequence[BlockHash], prefill: Prefill, *, spare: int, dead: int) -> int:
        """Return how many blocks are missing for a `reserve_prefill`. Below 1: none is missing. An empty pool takes every table
        up to its longest table."""
        hits = self.lookup(hashes[dead:])
        needed = self.blocks_needed(count, prefill, len(hashes), len(hits))
        evictable_hits = sum(block_id in self._cached for block_id in hits)
        return needed + spare - (self.num_allocatable - evictable_hits)

    def reserve_prefill(
        self, holder: Holder, count: int, hashes: Sequence[BlockHash], prefill: Prefill, *, dead: int
    ) -> Reservation:
        """Do the work of `reserve`, but take only hits and what a lease keeps. The caller has asked `lacking_for`."""
        end = self._end_of_gap(count, prefill, len(hashes))
        reservation = self.reserve(holder, len(hashes) + count - end, hashes, dead=dead)
        assert reservation is not None
        if end == len(hashes):
            return reservation
        self._blocks_of[holder][len(hashes) : len(hashes)] = [NULL_BLOCK] * (end - len(hashes))
        self._gaps[holder] = _Gap(len(hashes), len(hashes), end, self._promise_for(end - len(hashes)))
        self._promise(holder)
        return Reservation(self.blocks_of(holder), reservation.hits)

    def reach(self, holder: Holder) -> int | None:
        """Return how many of the first entries of the holder's table can be taken now. None: all entries."""
        if (gap := self._gaps.get(holder)) is None:
            return None
        reach = gap.begin + gap.promised + self.num_allocatable
        return reach if reach < gap.end else None

    def has_gap(self, holder: Holder) -> bool:
        """Tell whether entries of the holder's table are still to be taken."""
        return holder in self._gaps

    def fill(self, holder: Holder, count: int) -> None:
        """Take the first `count` entries of the holder's table, as far as they are in its gap. `reach` bounds them."""
        if (gap := self._gaps.get(holder)) is None or count <= gap.begin:
            return
        end = min(count, gap.end)
        assert end - gap.begin <= gap.promised + self.num_allocatable, "blocks are taken that were promised to others"
        self._history.append((f"take entries {gap.begin} to {end}", holder))
        taken = [self._take() for _ in range(gap.begin, end)]
        for block_id in taken:
            self._holders[block_id] = {holder}
        self._blocks_of[holder][gap.begin : end] = taken
        gap.begin = end
        self._promise(holder)
        if end == gap.end:
            self._close(holder)

    def free_behind(self, holder: Holder, dead: int) -> bool:
        """Do the work of `BlockPool.free_behind`. Dead blocks of a prompt that goes on are published before, and the blocks
        that it will need in their place are promised to it."""
        if (gap := self._gaps.get(holder)) is None:
            return super().free_behind(holder, dead)
        self._publish_up_to(holder, gap, dead)
        freed = super().free_behind(holder, dead)
        self._promise(holder)
        return freed

    def publish(self, holder: Holder, position: int, block_hash: BlockHash) -> None:
        """Do the work of `BlockPool.publish`, later if the holder's table has a gap."""
        gap = self._gaps.get(holder)
        if gap is None or position >= gap.end:
            super().publish(holder, position, block_hash)
        elif position >= gap.first:
            gap.unpublished[position] = block_hash

    def withdraw(self, holder: Holder, first: int = 0) -> None:
        """Do the work of `BlockPool.withdraw`. What is not published yet never is."""
        if (gap := self._gaps.get(holder)) is not None:
            gap.unpublished = {position: h for position, h in gap.unpublished.items() if position < first}
        super().withdraw(holder, first)

    def hashes(self) -> tuple[BlockHash, ...]:
        """Return all hashes that prompts find, or will find once a gap is closed."""
        return (*super().hashes(), *[block_hash for gap in self._gaps.values() for block_hash in gap.unpublished.values()])

    def withdraw_hashes(self, hashes: Iterable[BlockHash]) -> None:
        """Do the work of `BlockPool.withdraw_hashes`, also for blocks that would be published later."""
        gone = dict.fromkeys(hashes)
        for gap in self._gaps.values():
            gap.unpublished = {position: h for position, h in gap.unpublished.items() if h not in gone}
        super().withdraw_hashes(gone)

    def drop(self, holder: Holder) -> None:
        """Drop all references of the holder and its promise. Idempotent."""
        if (gap := self._gaps.get(holder)) is not None:
            self._publish_up_to(holder, gap, gap.end)
        super().drop(holder)
        if gap is not None:
            self._promised -= self._gaps.pop(holder).promised

    def check_invariants(self) -> None:
        """Check the promises as well: they can be kept, and what a holder gives back comes back. Raises AssertionError."""
        super().check_invariants()
        assert self._promised == sum(gap.promised for gap in self._gaps.values())
        assert self.num_allocatable >= 0, "more is promised than there is"
        for holder, gap in self._gaps.items():
            entries = self._blocks_of[holder]
            own = [block_id for block_id in entries[gap.first : gap.begin] if block_id != NULL_BLOCK]
            assert all(block_id == NULL_BLOCK for block_id in entries[gap.begin : gap.end]), "a block in a gap"
            assert NULL_BLOCK not in entries[gap.end :], "a null entry behind a gap"
            assert gap.begin < gap.end
            assert len(own) + gap.promised >= min(gap.most, len(own) + gap.end - gap.begin), "a promise is too small"
            assert all(self._holders[block_id] == {holder} and block_id not in self._hash_of for block_id in own)

    def _end_of_gap(self, count: int, prefill: Prefill, hits: int) -> int:
        """Return the first entry that is taken at once: a lease keeps it. The entries from `hits` on to it are the gap."""
        return max(hits, self._layout.first_live(prefill.tokens)) if prefill.lent else count

    def _promise_for(self, blocks: int) -> int:
        """Return the most blocks that are promised at once to a prompt that computes this number of blocks."""
        return min(blocks, self._layout.least_promise)

    def _promise(self, holder: Holder) -> None:
        """Promise the holder as many blocks as it may still take: the most that it may hold, less those that it holds."""
        gap = self._gaps[holder]
        held = gap.begin - max(gap.first, min(gap.begin, self._dead.get(holder, 0)))
        promised = min(max(0, gap.most - held), gap.end - gap.begin)
        self._promised += promised - gap.promised
        gap.promised = promised

    def _publish_up_to(self, holder: Holder, gap: _Gap, position: int) -> None:
        for published in [p for p in gap.unpublished if p < position]:
            super().publish(holder, published, gap.unpublished.pop(published))

    def _close(self, holder: Holder) -> None:
        """End the holder's gap: it takes no more blocks, so other holders may share its blocks."""
        gap = self._gaps.pop(holder)
        self._promised -= gap.promised
        self._publish_up_to(holder, gap, gap.end)

    def _live(self, holder: Holder) -> list[BlockId]:
        if holder not in self._gaps:
            return super()._live(holder)
        return [block_id for block_id in self._require(holder) if block_id != NULL_BLOCK]


class BlockPools:
    """The pools of all groups. The engine thread owns them. A `BlockPool` explains the operations."""

    def __init__(self, *num_blocks: int, layouts: Sequence[KvGroup] = ()) -> None:
        """Make a pool for each number of blocks. `layouts` describe the groups. Without them, no group has a window."""
        assert num_blocks
        assert len(layouts) in (0, len(num_blocks))
        self._windows = {index: layout for index, layout in enumerate(layouts) if layout.window is not None}
        self.published = PublishedKeys(len(num_blocks))
        self.groups: tuple[BlockPool, ...] = tuple(
            WindowPool(count, self._windows[index], self.published)
            if index in self._windows
            else BlockPool(count, self.published)
            for index, count in enumerate(num_blocks)
        )
        self._only = self.groups[0] if len(self.groups) == 1 else None  # asked directly: a step grows many sequences

    @property
    def windowed(self) -> bool:
        """True when a group has a sliding window, so that blocks can die before their sequence ends."""
        return bool(self._windows)

    @property
    def num_blocks(self) -> int:
        """The blocks of the smallest group."""
        return min([pool.num_blocks for pool in self.groups])

    @property
    def longest_table(self) -> int | None:
        """The blocks of the longest table that empty pools always take. A longer table may never fit. None: no limit."""
        sizes = [(self._windows.get(index), pool.num_blocks) for index, pool in enumerate(self.groups)]
        longest = [count if layout is None else layout.longest_table(count) for layout, count in sizes]
        return min([count for count in longest if count is not None], default=None)

    @property
    def num_free(self) -> int:
        """The blocks without useful content, in the group that has the fewest."""
        return min([pool.num_free for pool in self.groups])

    @property
    def num_allocatable(self) -> int:
        """The blocks that can be allocated now in every group."""
        if self._only is not None:
            return self._only.num_allocatable
        return min([pool.num_allocatable for pool in self.groups])

    def allocate(self, holder: Holder, count: int) -> BlockTables | None:
        """Append `count` blocks of each group to the holder's tables. Return None and change nothing when a group has fewer
        free blocks."""
        if self._only is not None:
            blocks = self._only.allocate(holder, count)
            return None if blocks is None else (blocks,)
        if count > self.num_allocatable:
            return None
        taken = [pool.allocate(holder, count) for pool in self.groups]
        return tuple([blocks for blocks in taken if blocks is not None])

    def shortage(
        self,
        count: int,
        hashes: Sequence[BlockHash] = (),
        *,
        spare: int | Sequence[int] = 0,
        arriving: int = 0,
        prefill: Prefill | None = None,
    ) -> Shortage | None:
        """Return the group that lacks the most blocks for `reserve` to succeed now and to leave `spare` blocks of each group
        allocatable. `spare` is one number for all groups or a number for each. None: no group lacks blocks."""
        common = self._common(hashes, arriving)
        spares = [spare] * len(self.groups) if isinstance(spare, int) else spare
        lacking = self._lacking(count, common, self._dead(common, arriving), spares, prefill)
        if (most := max(lacking)) <= 0:
            return None
        group = lacking.index(most)
        free, layout = self.groups[group].num_allocatable, self._windows.get(group)
        return Shortage(group, free + most, free, 0 if layout is None else layout.window or 0)

    def reserve(
        self,
        holder: Holder,
        count: int,
        hashes: Sequence[BlockHash],
        *,
        arriving: int = 0,
        prefill: Prefill | None = None,
    ) -> TableReservation | None:
        """Give `count` blocks of each group to a new holder. The longest prefix of `hashes` that every group has is shared.

        A peer computes the first `arriving` tokens, so the holder gets no blocks that are dead after them. `prefill` says what
        is computed here: in a group with a window, the blocks of the prompt are taken later, by `fill`, and null until then.
        Without `prefill` the holder gets all blocks at once. Return None and change nothing when a group does not have enough
        blocks. Raises `InternalBug` as `BlockPool.reserve` does.
        """
        common = self._common(hashes, arriving)
        dead = self._dead(common, arriving)
        several = len(self.groups) > 1 or prefill is not None
        if several and max(self._lacking(count, common, dead, [0] * len(self.groups), prefill)) > 0:
            return None
        found: list[Reservation] = []
        for pool, n in zip(self.groups, dead, strict=True):
            if prefill is not None and isinstance(pool, WindowPool):
                found.append(pool.reserve_prefill(holder, count, common, prefill, dead=n))
            elif (reservation := pool.reserve(holder, count, common, dead=n)) is not None:
                found.append(reservation)
            else:
                return None
        return TableReservation(tuple([reservation.block_ids for reservation in found]), found[0].hits)

    def _lacking(
        self, count: int, hashes: Sequence[BlockHash], dead: Sequence[int], spares: Sequence[int], prefill: Prefill | None
    ) -> list[int]:
        return [
            pool.lacking_for(count, hashes, prefill, spare=spare, dead=n)
            if prefill is not None and isinstance(pool, WindowPool)
            else pool.lacking(count, hashes, spare=spare, dead=n)
            for pool, spare, n in zip(self.groups, spares, dead, strict=True)
        ]

    def blocks_needed(self, tables: Iterable[tuple[int, Prefill]]) -> list[int]:
        """Return how many blocks of each group these tables need together. A table is its number of blocks and its prompt."""
        needed = [0] * len(self.groups)
        for count, prefill in tables:
            for index, pool in enumerate(self.groups):
                needed[index] += pool.blocks_needed(count, prefill) if isinstance(pool, WindowPool) else count
        return needed

    def leaves(self, count: int, spare: Sequence[int]) -> bool:
        """Tell whether `allocate` would leave `spare` blocks of each group allocatable."""
        return all(pool.num_allocatable - count >= n for pool, n in zip(self.groups, spare, strict=True))

    def reach(self, holder: Holder) -> int | None:
        """Return how many of the first blocks of the holder's tables can be taken now in every group. None: all blocks."""
        found = [pool.reach(holder) for pool in self.groups if isinstance(pool, WindowPool)]
        return min([count for count in found if count is not None], default=None)

    def has_gap(self, holder: Holder) -> bool:
        """Tell whether blocks of the holder's tables are still to be taken."""
        return any(pool.has_gap(holder) for pool in self.groups if isinstance(pool, WindowPool))

    def fill(self, holder: Holder, count: int) -> BlockTables:
        """Take the first `count` blocks of the holder's tables that are not taken yet, and return the tables. `reach` bounds
        `count`."""
        for pool in self.groups:
            if isinstance(pool, WindowPool):
                pool.fill(holder, count)
        return self.blocks_of(holder)

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
        """Remove the hashes of the holder's blocks from position `first` on in all groups, also when only one group is wrong.

        The groups of one token are computed from each other, so wrong content of one group may have spoilt all groups. The
        holder's dead blocks may be cached: `hashes` are the hashes of all its positions. None: the hashes are unknown, and
        groups with a window lose all hashes.
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
        """Return the holder's blocks in each group, dead blocks as null entries; an unknown holder has no blocks."""
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
        if self._only is not None:
            return self._only.counts()
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
