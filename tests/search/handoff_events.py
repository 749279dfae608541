"""What the model does to production machines, as plain functions of a machine and hashable values.

Time is translated so that now is always 0: a monotone clock has no origin of its own. `elapse` lets one unit pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.core.block_hash import BlockHash
from pdserve.core.blocks import BlockPool, BlockState, Holder, HolderKind, Reservation
from pdserve.core.ids import BlockId, BlockSum, Incarnation, LeaseId, ReaderId, SeqId
from pdserve.core.lease import CommitAnswer, FirstToken, LeaseTable
from pdserve.core.reader import Effect, Reader, ReaderState

NOW_S = 0.0
TOKEN = FirstToken(1, None)

LeaseKey = tuple[int, int]
ReaderKey = tuple[int, int]
Ended = tuple[SeqId, ...]
"""The sequences whose leases have left HELD, each of which is told once."""


def sequence(number: int) -> Holder:
    return Holder(HolderKind.SEQUENCE, SeqId(number))


def lease_of(number: int) -> Holder:
    return Holder(HolderKind.LEASE, SeqId(number))


def inbound(number: int) -> Holder:
    return Holder(HolderKind.INBOUND, SeqId(number))


LOCAL = sequence(0)
"""Work of the worker's own that only takes blocks away."""


# --- the lease table


def grant(
    table: LeaseTable, number: int, blocks: tuple[BlockId, ...], prompt_len: int, sums: tuple[BlockSum, ...] | None
) -> tuple[LeaseKey, Ended]:
    lease = table.grant(SeqId(number), (blocks,), prompt_len, sums=None if sums is None else (sums,), now_s=NOW_S)
    return (lease.incarnation, lease.counter), _ended(table)


def expect(table: LeaseTable, lease: LeaseKey, proof: bytes) -> None:
    table.expect(_lease_id(lease), proof)


def seal_lease(table: LeaseTable, lease: LeaseKey, first: int, block_sum: BlockSum) -> Ended:
    table.seal(_lease_id(lease), first, ((block_sum,),), now_s=NOW_S)
    return _ended(table)


def release_all_over(table: LeaseTable, blocks: tuple[BlockId, ...]) -> Ended:
    table.release_all_over([(0, block) for block in blocks], now_s=NOW_S)
    return _ended(table)


def advance(table: LeaseTable, lease: LeaseKey, watermark: int, final: bool) -> tuple[bool, Ended]:
    view = table.advance(_lease_id(lease), watermark, TOKEN if final else None, now_s=NOW_S)
    return view.held, _ended(table)


def renew(table: LeaseTable, lease: LeaseKey, proof: bytes) -> tuple[int | None, Ended]:
    """The watermark, or None for GONE."""
    view = table.renew(_lease_id(lease), proof, now_s=NOW_S)
    return (view.watermark if view.held else None), _ended(table)


def commit(
    table: LeaseTable, lease: LeaseKey, reader: ReaderKey, blocks: int, first: int, sums: tuple[BlockSum, ...], proof: bytes
) -> tuple[CommitAnswer, Ended]:
    reader_id = ReaderId(Incarnation(reader[0]), reader[1])
    answer = table.commit(_lease_id(lease), reader_id, blocks, first, sums, proof=proof, now_s=NOW_S)
    return answer, _ended(table)


def release(table: LeaseTable, lease: LeaseKey) -> tuple[None, Ended]:
    table.release(_lease_id(lease), now_s=NOW_S)
    return None, _ended(table)


def expire_due(table: LeaseTable) -> tuple[None, Ended]:
    table.expire_due(now_s=NOW_S)
    return None, _ended(table)


def elapse(table: LeaseTable) -> None:
    """A unit of time passes and nobody has noticed yet."""
    for lease in table._held.values():
        lease.expires_s = max(NOW_S, lease.expires_s - 1)
    table._earliest_s = max(NOW_S, table._earliest_s - 1)


def held_leases(table: LeaseTable) -> tuple[tuple[LeaseKey, SeqId, bool], ...]:
    """Each with its sequence, and whether it is due."""
    return tuple(((k.incarnation, k.counter), v.seq_id, v.expires_s <= NOW_S) for k, v in table._held.items())


def _ended(table: LeaseTable) -> Ended:
    return tuple(lease.seq_id for lease in table.take_returned())


def _lease_id(lease: LeaseKey) -> LeaseId:
    return LeaseId(Incarnation(lease[0]), lease[1])


# --- the block pool


def reserve(pool: BlockPool, holder: Holder, count: int, hashes: tuple[BlockHash, ...]) -> Reservation | None:
    return pool.reserve(holder, count, hashes)


def lend(pool: BlockPool, number: int) -> None:
    pool.share(sequence(number), lease_of(number))


def drop(pool: BlockPool, holder: Holder) -> None:
    pool.drop(holder)


def quarantine(pool: BlockPool, number: int) -> None:
    pool.quarantine(SeqId(number))


def end_quarantine(pool: BlockPool, number: int) -> None:
    pool.end_quarantine(SeqId(number))


def hand_over(pool: BlockPool, number: int) -> None:
    pool.hand_over(inbound(number), sequence(number))


def publish(pool: BlockPool, holder: Holder, position: int, block_hash: BlockHash) -> None:
    pool.publish(holder, position, block_hash)


def withdraw(pool: BlockPool, number: int, first: int) -> None:
    pool.withdraw(lease_of(number), first)


def seal(pool: BlockPool, number: int, position: int, block_sum: BlockSum) -> None:
    pool.seal(sequence(number), position, block_sum)


def sums_lent(pool: BlockPool, number: int) -> tuple[BlockSum | None, ...]:
    return pool.sums_of(lease_of(number))


def lent(pool: BlockPool, number: int) -> tuple[BlockId, ...]:
    return pool.blocks_of(lease_of(number))


def summed(pool: BlockPool) -> tuple[tuple[BlockId, BlockSum], ...]:
    """Every checksum of a block that means something."""
    return tuple((block, value) for block, value in pool._sums.items() if pool._states[block] is not BlockState.FREE)


def published(pool: BlockPool) -> frozenset[int]:
    return frozenset(pool._hash_of)


def evict_all(pool: BlockPool) -> None:
    """The worst that others can do: take everything that can be had, write it, and give it back."""
    pool.allocate(LOCAL, pool.num_allocatable)
    pool.drop(LOCAL)


def take_one(pool: BlockPool) -> BlockId | None:
    taken = pool.allocate(LOCAL, 1)
    return taken[0] if taken else None


def has_cached(pool: BlockPool) -> bool:
    return pool.counts().cached > 0


def all_idle(pool: BlockPool) -> bool:
    counts = pool.counts()
    return counts.free + counts.cached == counts.total


def meaningless(pool: BlockPool) -> frozenset[int]:
    """Blocks whose content nobody may use: what is read from them is garbage, the worst that they could hold."""
    return frozenset(i for i, state in enumerate(pool._states) if state in (BlockState.FREE, BlockState.QUARANTINED))


def writable(pool: BlockPool, number: int) -> frozenset[int]:
    """Where a read of this bind may write."""
    fresh = (block for block in pool.blocks_of(inbound(number)) if block not in pool._hash_of)
    return frozenset([*fresh, *pool._quarantined.get(SeqId(number), ())])


def with_prefix(pool: BlockPool, hashes: Sequence[BlockHash], sums: Sequence[BlockSum] = ()) -> BlockPool:
    """The pool after an earlier sequence has left this prefix in it."""
    pool.allocate(LOCAL, len(hashes))
    for position, block_hash in enumerate(hashes):
        pool.publish(LOCAL, position, block_hash)
    for position, block_sum in enumerate(sums):
        pool.seal(LOCAL, position, block_sum)
    pool.drop(LOCAL)
    return pool


# --- the reader


def new_reader(reader_type: type[Reader], lease: LeaseKey, prompt_len: int, block_size: int, first_block: int) -> Reader:
    return reader_type(_lease_id(lease), prompt_len, block_size, first_block)


def advanced(reader: Reader, lease: LeaseKey, watermark: int) -> list[Effect]:
    return reader.advanced(_lease_id(lease), watermark)


def told(reader: Reader, method: str, *args: Any) -> list[Effect]:
    return list(getattr(reader, method)(*args))


def state_of(reader: Reader) -> ReaderState:
    return reader.state


def waits(reader: Reader) -> bool:
    """Before its first read."""
    return not reader.ended and reader.reads == 0
