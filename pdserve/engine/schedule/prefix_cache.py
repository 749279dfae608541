"""Sharing of blocks between sequences that begin with the same tokens. The module is pure.

A full block is published under the hash of all tokens up to its end, once its step is collected and, for a pulled prompt,
its lease is committed. Sequences that begin with the same tokens then share the block instead of computing or pulling it
again. Only whole blocks are shared, and a published block is never written, so no block needs to be copied on write.
"""

from __future__ import annotations

from pdserve.core.block_hash import BlockHash, PrefixChain, chain_salt
from pdserve.core.block_pools import BlockPools, Prefill, TableReservation
from pdserve.core.blocks import Holder, HolderKind
from pdserve.core.request_spec import RequestSpec
from pdserve.engine.schedule.sequence import Sequence

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
