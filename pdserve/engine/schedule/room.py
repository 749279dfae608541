"""The blocks that sequences need and get: whether a table fits, and how far a step may go in it. The module is pure.

A prompt gets all its blocks at once, except in a KV group with a sliding window. There the pool only promises what the window
needs, and a chunk takes its blocks when it is planned. A chunk ends earlier where the pool has no blocks for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.core.block_pools import BlockPools, Prefill
from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.ids import NULL_BLOCK
from pdserve.core.kv_layout import ceil_div
from pdserve.engine.schedule.prefix_cache import PrefixCache
from pdserve.engine.schedule.sequence import Sequence, SequenceKind
from pdserve.engine.schedule.sequence_machine import SequenceState


class Room:
    """The room for sequences in the pools. The scheduler owns it."""

    def __init__(self, pool: BlockPools, prefix: PrefixCache, block_size: int, largest_step: int) -> None:
        """`largest_step`: a step computes at most so many tokens."""
        self._pool = pool
        self._prefix = prefix
        self._block_size = block_size
        self._largest_step = largest_step
        self._windowed = pool.windowed

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens."""
        return ceil_div(tokens, self._block_size)

    def prefill(self, tokens: int, kind: SequenceKind) -> Prefill | None:
        """Return what the pools must know of a prompt. None: it gets all its blocks at once."""
        if not self._windowed:
            return None
        return Prefill(tokens, self._largest_step, lent=kind is SequenceKind.LENT)

    def fits(self, seq: Sequence) -> bool:
        """Tell whether a waiting sequence can have its blocks now."""
        tokens = len(seq.tokens)
        hashes = self._prefix.hashes(seq.chain, seq.tokens, tokens - 1)
        return self._pool.shortage(self.blocks_for(tokens), hashes, prefill=self.prefill(tokens, seq.kind)) is None

    def awaited(self, waiting: Iterable[Sequence]) -> list[int]:
        """Return how many blocks of each group waiting sequences need together. Prefixes that are here do not count."""
        if not self._windowed:
            return [sum([self.blocks_for(len(seq.tokens)) for seq in waiting])] * len(self._pool.groups)
        asked = ((len(seq.tokens), self.prefill(len(seq.tokens), seq.kind)) for seq in waiting)
        return self._pool.blocks_needed((self.blocks_for(tokens), prefill) for tokens, prefill in asked if prefill is not None)

    def chunk(self, seq: Sequence, budget: int) -> int:
        """Return the number of tokens of the sequence's next chunk, at most `budget`. It is never 0, since the pools promise
        blocks for at least a block of tokens, and at the end for the block that an output grows into."""
        if seq.taken is not None and (reach := self._pool.reach(seq.holder)) is not None:
            budget = min(budget, reach * self._block_size - seq.computed, seq.remaining - 1)
            assert budget > 0, "a prompt that has begun cannot go on"
        return seq.chunk(budget, self._block_size)

    def take(self, seq: Sequence, count: int) -> None:
        """Take the blocks for the next `count` tokens of a prompt, as far as they were not taken with its table."""
        if seq.taken is None:
            return
        taken = seq.num_blocks if count == seq.remaining else self.blocks_for(seq.computed + count)
        seq.has_blocks(self._pool.fill(seq.holder, taken))
        seq.taken = taken if self._pool.has_gap(seq.holder) else None

    def complete(self, decoding: Iterable[Sequence]) -> None:
        """Take the last blocks of sequences that decode. A sequence that was recomputed, all but its last token, may lack
        them."""
        if self._windowed:
            for seq in decoding:
                if seq.taken is not None:
                    self.take(seq, 1)

    def check(self, seq: Sequence) -> None:
        """Check a sequence's tables against the pools. Raises AssertionError when they disagree."""
        inbound = seq.state is SequenceState.INBOUND
        held = self._pool.blocks_of(Holder(HolderKind.INBOUND if inbound else HolderKind.SEQUENCE, seq.seq_id))
        assert held == seq.block_tables or not any((*held, *seq.block_tables))
        dead = self._pool.count_dead(len(seq.tokens) if inbound else seq.computed)
        for table, count in zip(seq.block_tables, dead, strict=False):
            assert table[:count] == (NULL_BLOCK,) * count
            assert NULL_BLOCK not in table[count : seq.taken]
            assert len(table) == seq.num_blocks
        assert bool(seq.num_blocks) == (seq.state is not SequenceState.WAITING)
        assert (seq.taken is not None) == self._pool.has_gap(seq.holder)
        assert seq.computed <= (seq.num_blocks if seq.taken is None else seq.taken) * self._block_size
