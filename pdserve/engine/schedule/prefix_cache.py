"""Which of a sequence's blocks others have computed already, and which of its own others may find. Pure.

Full blocks whose step is collected (and, of a pulled prompt, whose lease is committed) are published under the hash of
all tokens up to their end, and sequences that begin with the same tokens share them instead of computing or pulling
them again. Only whole blocks are shared, and none is written after it was published, so nothing is ever copied on write.
"""

from __future__ import annotations

from pdserve.core.block_hash import BlockHash, PrefixChain
from pdserve.core.blocks import BlockPool, Holder, HolderKind, Reservation
from pdserve.engine.schedule.sequence import Sequence

TokenIds = tuple[int, ...] | list[int]


class PrefixCache:
    """Owner: the scheduler. Nothing is shared where `salt` is None."""

    def __init__(self, pool: BlockPool, block_size: int, salt: bytes | None) -> None:
        self._pool = pool
        self._block_size = block_size
        self._salt = salt
        self.queried = 0
        """Tokens of sequences that got their blocks, since the start."""
        self.hit = 0
        """Of these, tokens whose KV was here already."""

    def chain(self, cache_salt: str) -> PrefixChain | None:
        """For a new sequence. Blocks are shared among those of one `cache_salt`."""
        if self._salt is None:
            return None
        return PrefixChain(self._block_size, salt=self._salt + cache_salt.encode(errors="replace"))

    def hashes(self, chain: PrefixChain | None, tokens: TokenIds, limit: int) -> list[BlockHash]:
        """Of the full blocks among the first `limit` tokens; none where nothing is shared."""
        return chain.first(limit // self._block_size, tokens) if chain is not None else []

    def take(self, seq: Sequence, holder: Holder, count: int, hashes: list[BlockHash]) -> Reservation:
        """Give a sequence all its blocks, which are there. What its hits hold is computed; an inbound one waits for the rest
        from a peer."""
        reservation = self._pool.reserve(holder, count, hashes)
        assert reservation is not None
        seq.has_blocks(reservation.block_ids)
        seq.published = seq.final = reservation.hits
        if holder.kind is HolderKind.SEQUENCE:
            seq.computed = reservation.hits * self._block_size
        if seq.chain is not None:
            self.queried += len(seq.tokens)
            self.hit += reservation.hits * self._block_size
        return reservation

    def withdraw(self, seq: Sequence) -> None:
        """What the sequence holds may be why its logits are no numbers: nobody else is to find it."""
        self._pool.withdraw(seq.holder)

    def publish(self, seq: Sequence) -> None:
        """Blocks that are full and final, and the sequence's own, can be found by others from now on."""
        full = seq.computed // self._block_size
        if seq.chain is None or full <= seq.published:
            return
        hashes = seq.chain.first(full, seq.tokens)
        for position in range(seq.published, full):
            self._pool.publish(seq.holder, position, hashes[position])
        seq.published = full
