"""The blocks that sequences need, get and share. The module is pure.

A prompt gets all its blocks at once, except in a KV group with a sliding window. There the pool only promises what the window
needs, and a chunk takes its blocks when it is planned. A chunk ends earlier where the pool has no blocks for it.

A full block is published under the hash of all tokens up to its end, once its step is collected and, for a pulled prompt,
its lease is committed. Sequences that begin with the same tokens then share the block instead of computing or pulling it
again. Only whole blocks are shared, and a published block is never written, so no block needs to be copied on write.
"""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.core.block_hash import BlockHash, PrefixChain, chain_salt
from pdserve.core.block_pools import BlockPools, Prefill, TableReservation
from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.ids import NULL_BLOCK
from pdserve.core.kv_layout import ceil_div
from pdserve.core.request_spec import RequestSpec
from pdserve.engine.schedule.sequence import Sequence, SequenceKind, SequenceState

TokenIds = tuple[int, ...] | list[int]


class PrefixCache:
    """Finds and publishes shared blocks. The scheduler owns it. Nothing is shared when `salt` is None."""

    def __init__(self, pool: BlockPools, block_size: int, salt: bytes | None) -> None:
        self._pool = pool
        self._block_size = block_size
        self._salt = salt
        self.queried = 0
        """Tokens of all sequences that got their blocks, since the start. Counted only for sequences that share blocks."""
        self.hit = 0
        """Those of the `queried` tokens whose KV was here already."""

    def chain(self, cache_salt: str) -> PrefixChain | None:
        """Return the chain of block hashes for a new sequence; None when nothing is shared.

        Only sequences of the same `cache_salt` share blocks.
        """
        if self._salt is None:
            return None
        return PrefixChain(self._block_size, salt=chain_salt(self._salt, cache_salt))

    def chain_to_compute(self, spec: RequestSpec, resumed: tuple[int, ...]) -> PrefixChain | None:
        """Return the chain of a new sequence that computes its prompt here. A scored prompt takes and publishes
        no block, because the log-probabilities of the tokens of a shared block are unknown."""
        scored = spec.sampling.prompt_logprobs is not None and not resumed
        return None if scored else self.chain(spec.cache_salt)

    def hashes(self, chain: PrefixChain | None, tokens: TokenIds, limit: int) -> list[BlockHash]:
        """Return the hashes of the full blocks among the first `limit` tokens; an empty list when nothing is shared."""
        return chain.first(limit // self._block_size, tokens) if chain is not None else []

    def take(
        self,
        seq: Sequence,
        holder: Holder,
        count: int,
        hashes: list[BlockHash],
        *,
        arriving: int = 0,
        prefill: Prefill | None = None,
    ) -> TableReservation:
        """Give a sequence all its `count` blocks, except those that are dead after the first `arriving` tokens, which a peer
        computes, and those that are taken later for `prefill`. The caller has checked that the pool has them.

        The tokens of prefix hits count as computed. An inbound sequence gets the KV of its other blocks from a peer.
        """
        reservation = self._pool.reserve(holder, count, hashes, arriving=arriving, prefill=prefill)
        assert reservation is not None
        seq.has_blocks(reservation.block_tables)
        seq.taken = reservation.hits if prefill is not None and self._pool.has_gap(holder) else None
        seq.published = seq.final = reservation.hits
        seq.next_death = 0
        if holder.kind is HolderKind.SEQUENCE:
            seq.computed = reservation.hits * self._block_size
        if seq.chain is not None:
            self.queried += len(seq.tokens)
            self.hit += reservation.hits * self._block_size
        return reservation

    def withdraw(self, seq: Sequence) -> None:
        """Withdraw the sequence's blocks from sharing: their KV may be the reason why its logits are not finite numbers."""
        hashes = seq.chain.first(seq.published, seq.tokens) if seq.chain is not None else ()
        self._pool.withdraw(seq.holder, hashes=hashes)

    @property
    def windowed(self) -> bool:
        """True when a KV group has a sliding window, so that `free_behind` has something to do."""
        return self._pool.windowed

    def free_behind(self, seq: Sequence) -> None:
        """Drop the sequence's references on the blocks that none of its later tokens sees. Published ones stay cached."""
        if (tables := self._pool.free_behind(seq.holder, seq.computed)) is not None:
            seq.has_blocks(tables)
        seq.next_death = self._pool.next_death(seq.computed)

    def publish(self, seq: Sequence) -> None:
        """Publish the sequence's own blocks that are full and final, so that other sequences find them from now on."""
        full = seq.computed // self._block_size
        if seq.chain is None or full <= seq.published:
            return
        hashes = seq.chain.first(full, seq.tokens)
        for position in range(seq.published, full):
            self._pool.publish(seq.holder, position, hashes[position])
        seq.published = full


class Room:
    """The room for sequences in the pools. The scheduler owns it."""

    def __init__(self, pool: BlockPools, prefix: PrefixCache, block_size: int, largest_step: int) -> None:
        """`largest_step`: a step computes at most so many tokens."""
        self._pool = pool
        self._prefix = prefix
        self._block_size = block_size
        self._largest_step = largest_step
        self.windowed = pool.windowed
        """True when a KV group has a sliding window. Otherwise no table has a gap, so that `complete` has nothing to do."""

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that hold `tokens` tokens."""
        return ceil_div(tokens, self._block_size)

    def prefill(self, tokens: int, kind: SequenceKind) -> Prefill | None:
        """Return what the pools must know of a prompt. None: it gets all its blocks at once."""
        if not self.windowed:
            return None
        return Prefill(tokens, self._largest_step, lent=kind is SequenceKind.LENT)

    def fits(self, seq: Sequence) -> bool:
        """Tell whether a waiting sequence can have its blocks now."""
        tokens = len(seq.tokens)
        hashes = self._prefix.hashes(seq.chain, seq.tokens, tokens - 1)
        return self._pool.shortage(self.blocks_for(tokens), hashes, prefill=self.prefill(tokens, seq.kind)) is None

    def awaited(self, waiting: Iterable[Sequence]) -> list[int]:
        """Return how many blocks of each group waiting sequences need together. Prefixes that are here do not count."""
        if not self.windowed:
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
