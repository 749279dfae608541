"""What the model does to production machines, as plain functions of a machine and hashable values.

Time is translated so that now is always 0: a monotone clock has no origin of its own. `elapse` lets one unit pass.

The memory of a worker holds the blocks of all KV groups, one group after another. The model names a block by its address,
which is its index in that memory. Production machines get the ids that they gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from pdserve.core.block_hash import BlockHash
from pdserve.core.block_pools import BlockPools, BlockTables, Prefill, TableReservation, WindowPool
from pdserve.core.blocks import BlockPool, BlockState, Holder, HolderKind
from pdserve.core.ids import NULL_BLOCK, BlockId, BlockSum, Incarnation, LeaseId, ReaderId, SeqId
from pdserve.core.kv_layout import KvGroup
from pdserve.core.lease import CommitAnswer, FirstToken, LeaseTable
from pdserve.core.reader import Effect, Reader, ReaderState

NOW_S = 0.0
TOKEN = FirstToken(1, None)

LeaseKey = tuple[int, int]
ReaderKey = tuple[int, int]
Ended = tuple[SeqId, ...]
"""The sequences whose leases have left HELD, each of which is told once."""
Tables = tuple[tuple[int, ...], ...]
"""The addresses of a holder's blocks in each group, in prompt order. The groups come first."""
Sums = tuple[tuple[BlockSum, ...], ...]
"""Checksums of blocks, in prompt order, for each group."""


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
    table: LeaseTable, number: int, block_tables: BlockTables, prompt_len: int, sums: Sums | None
) -> tuple[LeaseKey, Ended]:
    lease = table.grant(SeqId(number), block_tables, prompt_len, sums=sums, now_s=NOW_S)
    return (lease.incarnation, lease.counter), _ended(table)


def expect(table: LeaseTable, lease: LeaseKey, proof: bytes) -> None:
    table.expect(_lease_id(lease), proof)


def seal_lease(table: LeaseTable, lease: LeaseKey, first: int, block_sums: tuple[BlockSum, ...]) -> Ended:
    table.seal(_lease_id(lease), first, tuple((block_sum,) for block_sum in block_sums), now_s=NOW_S)
    return _ended(table)


def release_all_over(table: LeaseTable, blocks: tuple[tuple[int, BlockId], ...]) -> Ended:
    table.release_all_over(blocks, now_s=NOW_S)
    return _ended(table)


def advance(table: LeaseTable, lease: LeaseKey, watermark: int, final: bool) -> tuple[bool, Ended]:
    view = table.advance(_lease_id(lease), watermark, TOKEN if final else None, now_s=NOW_S)
    return view.held, _ended(table)


def renew(table: LeaseTable, lease: LeaseKey, proof: bytes) -> tuple[int | None, Ended]:
    """The watermark, or None for GONE."""
    view = table.renew(_lease_id(lease), proof, now_s=NOW_S)
    return (view.watermark if view.held else None), _ended(table)


def commit(
    table: LeaseTable, lease: LeaseKey, reader: ReaderKey, blocks: int, first: int, sums: Sums, proof: bytes
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


# --- the block pools


def new_pools(
    pools_type: type[BlockPools], pool_type: type[BlockPool], sizes: Sequence[int], layouts: Sequence[KvGroup] = ()
) -> BlockPools:
    """Pools of `pools_type` with a pool of `pool_type` for each group. Tests replace either type."""
    pools = pools_type(*sizes, layouts=layouts)
    shapes = layouts or [None] * len(sizes)
    pools.groups = tuple(_new_pool(pool_type, size, layout) for size, layout in zip(sizes, shapes, strict=True))
    pools._only = pools.groups[0] if len(sizes) == 1 else None
    return pools


def _new_pool(pool_type: type[BlockPool], size: int, layout: KvGroup | None) -> BlockPool:
    """A pool of `pool_type`. That of a group with a window is a `WindowPool`, unless a test replaces the plain pool."""
    windowed = layout is not None and layout.window is not None
    if layout is not None and windowed and issubclass(pool_type, WindowPool):
        return pool_type(size, layout)
    if layout is not None and windowed and pool_type is BlockPool:
        return WindowPool(size, layout)
    return BlockPool(size) if issubclass(pool_type, WindowPool) else pool_type(size)


def offsets(pools: BlockPools) -> tuple[int, ...]:
    """The address of the first block of each group."""
    return tuple(sum(pool.num_blocks for pool in pools.groups[:group]) for group in range(len(pools.groups)))


def addresses(pools: BlockPools, block_tables: BlockTables) -> Tables:
    """The addresses of blocks that are given by their ids in each group. That of a dead block is `NULL_BLOCK`."""
    tables = zip(offsets(pools), block_tables, strict=True)
    return tuple(tuple(at + block if block != NULL_BLOCK else NULL_BLOCK for block in table) for at, table in tables)


def reserve(
    pools: BlockPools,
    holder: Holder,
    count: int,
    hashes: tuple[BlockHash, ...],
    arriving: int = 0,
    prefill: Prefill | None = None,
) -> TableReservation | None:
    """Blocks of every group for a new holder, or None. The tables of the answer are ids."""
    return pools.reserve(holder, count, hashes, arriving=arriving, prefill=prefill)


def fill(pools: BlockPools, number: int, count: int) -> BlockTables:
    """The ids of the blocks of a sequence in each group, once its first `count` blocks are taken."""
    return pools.fill(sequence(number), count)


def lend(pools: BlockPools, number: int, tokens: int) -> BlockTables:
    """The ids of the blocks that the lease holds in each group."""
    return pools.share(sequence(number), lease_of(number), tokens)


def free_behind(pools: BlockPools, number: int, computed: int) -> BlockTables:
    """The ids of the sequence's blocks in each group, once those behind the window are freed."""
    pools.free_behind(sequence(number), computed)
    return pools.blocks_of(sequence(number))


def drop(pools: BlockPools, holder: Holder) -> None:
    pools.drop(holder)


def quarantine(pools: BlockPools, number: int) -> None:
    pools.quarantine(SeqId(number))


def end_quarantine(pools: BlockPools, number: int) -> None:
    pools.end_quarantine(SeqId(number))


def hand_over(pools: BlockPools, number: int) -> None:
    pools.hand_over(inbound(number), sequence(number))


def publish(pools: BlockPools, holder: Holder, position: int, block_hash: BlockHash) -> None:
    pools.publish(holder, position, block_hash)


def withdraw(pools: BlockPools, number: int, first: int) -> None:
    pools.withdraw(lease_of(number), first)


def seal(pools: BlockPools, number: int, position: int, block_sums: tuple[BlockSum, ...]) -> None:
    pools.seal([table[position] for table in pools.blocks_of(sequence(number))], block_sums)


def sums_lent(pools: BlockPools, number: int) -> tuple[tuple[BlockSum | None, ...], ...]:
    return pools.sums_of(lease_of(number))


def lent(pools: BlockPools, number: int) -> BlockTables:
    """The ids of the blocks that the lease holds in each group."""
    return pools.blocks_of(lease_of(number))


def summed(pools: BlockPools) -> tuple[tuple[int, BlockSum], ...]:
    """Every checksum of a block that means something, with the block's address."""
    return tuple(
        (at + block, value)
        for at, pool in zip(offsets(pools), pools.groups, strict=True)
        for block, value in pool._sums.items()
        if pool._states[block] is not BlockState.FREE
    )


def published(pools: BlockPools) -> frozenset[int]:
    """The addresses of all blocks that a prompt can find, if it looks in one group."""
    return frozenset(chain.from_iterable(addresses(pools, tuple(tuple(pool._hash_of) for pool in pools.groups))))


def evict_all(pools: BlockPools, group: int) -> None:
    """The worst that others can do to a group: take everything that can be had, write it, and give it back."""
    pool = pools.groups[group]
    pool.allocate(LOCAL, pool.num_allocatable)
    pool.drop(LOCAL)


def take_one(pools: BlockPools) -> tuple[int, ...] | None:
    """The address of one block of each group."""
    taken = pools.allocate(LOCAL, 1)
    return tuple(chain.from_iterable(addresses(pools, taken))) if taken else None


def groups_with_cached(pools: BlockPools) -> tuple[int, ...]:
    return tuple(group for group, pool in enumerate(pools.groups) if pool.counts().cached > 0)


def all_idle(pools: BlockPools) -> bool:
    counts = pools.counts()
    return counts.free + counts.cached == counts.total


def meaningless(pools: BlockPools) -> frozenset[int]:
    """Blocks whose content nobody may use: what is read from them is garbage, the worst that they could hold."""
    states = chain.from_iterable(pool._states for pool in pools.groups)
    return frozenset(at for at, state in enumerate(states) if state in (BlockState.FREE, BlockState.QUARANTINED))


def in_quarantine(pools: BlockPools) -> frozenset[int]:
    states = chain.from_iterable(pool._states for pool in pools.groups)
    return frozenset(at for at, state in enumerate(states) if state is BlockState.QUARANTINED)


def writable(pools: BlockPools, number: int) -> frozenset[int]:
    """Where a read of this bind may write."""
    return frozenset(chain.from_iterable(addresses(pools, tuple(_writable_blocks(pool, number) for pool in pools.groups))))


def _writable_blocks(pool: BlockPool, number: int) -> tuple[BlockId, ...]:
    fresh = (block for block in pool.blocks_of(inbound(number)) if block not in pool._hash_of)
    return (*fresh, *pool._quarantined.get(SeqId(number), ()))


def with_prefix(pools: BlockPools, hashes: Sequence[BlockHash], sums: Sequence[tuple[BlockSum, ...]] = ()) -> BlockTables:
    """Let an earlier sequence leave this prefix in the pools, with the checksums of each position. The ids of its blocks."""
    block_tables = pools.allocate(LOCAL, len(hashes))
    assert block_tables is not None
    for position, block_hash in enumerate(hashes):
        pools.publish(LOCAL, position, block_hash)
    for position, block_sums in enumerate(sums):
        pools.seal([table[position] for table in block_tables], block_sums)
    pools.drop(LOCAL)
    return block_tables


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
