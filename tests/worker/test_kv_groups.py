"""A handoff of two KV groups of different layouts: real pools, staging, checksums and lease table; the link is a plain call.

Group 0 has K and V, of the same dtype on both sides, and is read straight into the pool. Group 1 has one latent plane, and may
have another dtype at the reader: then it passes staging blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
import torch

from kvtransfer import pull as pulls
from kvtransfer.backends.fake import FakeFabric, FakeTransport
from kvtransfer.lease_client import Committed, FollowedLease
from kvtransfer.pull import Pull
from kvtransfer.routed import RoutedTransport
from kvtransfer.staging import Staging
from kvtransfer.thread import PoolSource, TransferThread
from kvtransfer.ticket import Ticket
from pdserve.config import LeaseConfig
from pdserve.core.block_hash import prompt_hash
from pdserve.core.blocks import SumBlocks
from pdserve.core.errors import KvCorrupt, LeaseGone, TransferFailed
from pdserve.core.ids import NULL_BLOCK, BlockId, BlockSum, Incarnation, LeaseId, ReaderId, SeqId
from pdserve.core.kv_layout import KvGroup, KvSpec
from pdserve.core.lease import FirstToken, LeaseTable, LeaseView
from pdserve.core.reader import Reader, SendCommit
from pdserve.engine.kv.convert import convert_blocks
from pdserve.engine.kv.pool import KvPool
from pdserve.worker.kv_memory import WorkerKv

SIZE = 4
SPEC = KvSpec((KvGroup((0, 2), ((2, 16), (2, 16)), SIZE, "float32"), KvGroup((1,), ((1, 40),), SIZE, "bfloat16")))
LENDER, READER = Incarnation(1), Incarnation(2)
NUM_BLOCKS = 24
PROMPT_LEN = 5 * SIZE + 1
THEIRS = tuple(tuple(BlockId(b) for b in table) for table in ((9, 2, 7, 0, 11, 4), (3, 8, 5, 20, 1, 6)))
OURS = ((5, 4, 3, 2, 1, 0), (10, 12, 14, 16, 18, 20))
CPU = torch.device("cpu")
FIRST = FirstToken(42, None)


def pool_of(spec: KvSpec, *, seed: int | None) -> KvPool:
    pool = KvPool(spec, NUM_BLOCKS * spec.block_bytes, CPU, torch.float32)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        for cache in pool.caches:
            cache.tensor.copy_(torch.randn(cache.tensor.shape, generator=generator))
    return pool


class Link:
    """The lender's end: the production table, called at once."""

    def __init__(self) -> None:
        self.table = LeaseTable(LENDER, ttl_s=1000.0)

    async def commit(self, lease_id: LeaseId, proof: bytes, reader_id: ReaderId, commit: SendCommit) -> Committed:
        answer = self.table.commit(lease_id, reader_id, commit.blocks, commit.first, commit.sums, proof=proof, now_s=0)
        return Committed(answer, rotted_blocks=0)

    async def release(self, lease_id: LeaseId, proof: bytes) -> None: ...

    def unfollow(self, lease: FollowedLease) -> None: ...


@dataclass
class World:
    fabric: FakeFabric
    theirs: KvPool
    ours: KvPool
    link: Link
    ticket: Ticket
    lease: FollowedLease
    pull: Pull
    ours_tables: tuple[tuple[int, ...], ...] = OURS

    def final(self, tokens: int) -> None:
        first = FIRST if tokens == PROMPT_LEN else None
        self.lease.apply(LeaseView(self.lease.lease_id, True, tokens, first))

    async def run(self) -> None:
        """Two chunks, then token 0."""
        running = asyncio.create_task(self.pull.run(wait_s=60))
        for tokens in (2 * SIZE, 4 * SIZE, PROMPT_LEN):
            self.link.table.advance(self.lease.lease_id, tokens, FIRST if tokens == PROMPT_LEN else None, now_s=0)
            self.final(tokens)
            await asyncio.sleep(0.01)
        await running

    def arrived(self) -> list[bool]:
        """Group by group: our blocks hold what the lender's hold, in our own form."""
        found = []
        caches = zip(self.theirs.caches, self.ours.caches, strict=True)
        for theirs, ours, (source, target) in zip(self.ticket.block_tables, self.ours_tables, caches, strict=True):
            dead = ours.count(NULL_BLOCK)
            expected, tokens = source.blocks[list(theirs[dead:])], PROMPT_LEN - dead * SIZE
            if source.layout != target.layout:
                expected = convert_blocks(expected, source.layout, target.layout, tokens)
            found.append(torch.equal(target.blocks[list(ours[dead:])], expected))
        return found


@asynccontextmanager
async def world(
    second: str = "bfloat16", *, damage: Callable[[KvPool], None] = lambda _: None, window: int | None = None
) -> AsyncIterator[World]:
    """`second`: the dtype of our second group. `damage` may change our pool before what was read is summed. `window`: that
    of the second group, in tokens."""
    spec = KvSpec((SPEC.groups[0], replace(SPEC.groups[1], window=window)))
    dead = [group.first_live(PROMPT_LEN) for group in spec.groups]
    their_tables, our_tables = [
        tuple((NULL_BLOCK,) * n + tuple(map(BlockId, table[n:])) for n, table in zip(dead, tables, strict=True))
        for tables in (THEIRS, OURS)
    ]
    fabric, theirs = FakeFabric(), pool_of(spec, seed=1)
    ours = pool_of(KvSpec((spec.groups[0], replace(spec.groups[1], dtype=second))), seed=None)
    lender, reader = WorkerKv(theirs), WorkerKv(ours)
    metadata = RoutedTransport({0: FakeTransport(fabric, LENDER, lender.regions_of(0))}).metadata()

    def sums_of(group: int) -> SumBlocks:
        of_group = reader.sums_of(group, beside=True)

        def sums(block_ids: Sequence[int], /) -> tuple[BlockSum, ...]:
            damage(ours)
            return of_group(block_ids)

        return sums

    thread = TransferThread(
        lambda: RoutedTransport({0: FakeTransport(fabric, READER, reader.regions_of(0))}),
        sum_blocks={region: sums_of(group) for group, region in enumerate(reader.regions)},
    )
    staging = Staging(thread, reader.stage, num_blocks=4, chunk_blocks=2)
    link = Link()
    sealed = tuple(lender.sums_of(group, beside=False)(table) for group, table in enumerate(THEIRS))
    lease_id = link.table.grant(SeqId(1), their_tables, PROMPT_LEN, sums=((), ()), now_s=0)
    link.table.seal(lease_id, 0, sealed, now_s=0)
    ticket = Ticket(
        incarnation=LENDER,
        lease_counter=lease_id.counter,
        peer_address="host:1",
        kv_spec=spec,
        regions=lender.regions,
        block_tables=their_tables,
        prompt_len=PROMPT_LEN,
        prompt_hash=prompt_hash(b"", ""),
        checksums=True,
    )
    ticket = Ticket.decode(ticket.with_mac(b"secret").encode())
    link.table.expect(lease_id, ticket.proof)
    lease = FollowedLease(lease_id, PROMPT_LEN, ticket.proof, link)
    try:
        await thread.start()
        await thread.connect(LENDER, metadata)
        sources = [
            PoolSource(thread, reader.regions[group]) if theirs_ == ours_ else staging.source_for(ticket, group)
            for group, (theirs_, ours_) in enumerate(zip(ticket.kv_spec.groups, ours.spec.groups, strict=True))
        ]
        pull = Pull(lease, ticket, our_tables, ReaderId(READER, 1), sources, LeaseConfig())
        yield World(fabric, theirs, ours, link, ticket, lease, pull, our_tables)
        assert staging.idle
        assert thread.num_unstopped == 0
    finally:
        await thread.close()
        staging.close()


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("second", ["bfloat16", "float32", "int8"])
def test_every_group_arrives_and_only_in_its_own_blocks(second: str) -> None:
    async def test() -> None:
        async with world(second) as w:
            await w.run()
            assert w.arrived() == [True, True]
            for cache, table in zip(w.ours.caches, OURS, strict=True):
                others = [block for block in range(NUM_BLOCKS) if block not in table]
                assert not cache.blocks[others].any()
            assert w.link.table.num_held == 0

    run(test)


@pytest.mark.parametrize("second", ["bfloat16", "int8"])
@pytest.mark.parametrize(("window", "live"), [(1, 1), (6, 2), (14, 4)])
def test_dead_blocks_of_a_group_are_neither_read_nor_compared(second: str, window: int, live: int) -> None:
    """The first reads have no block of the second group, and still its live blocks are compared."""

    async def test() -> None:
        async with world(second, window=window) as w:
            await w.run()
            assert w.arrived() == [True, True]
            others = [block for block in range(NUM_BLOCKS) if block not in w.ours_tables[1]]
            assert len(others) == NUM_BLOCKS - live
            assert not w.ours.caches[1].blocks[others].any()
            theirs = w.theirs.spec.groups
            assert w.pull._pulled().kv_bytes == 6 * theirs[0].block_bytes + live * theirs[1].block_bytes == w.ticket.kv_bytes
            assert w.link.table.num_held == 0

    run(test)


def test_one_wrong_bit_of_a_live_block_behind_dead_ones_is_corrupt() -> None:
    async def test() -> None:
        def flip(ours: KvPool) -> None:
            ours.caches[1].blocks[OURS[1][5], 5] ^= 1

        async with world(damage=flip, window=6) as w:
            with pytest.raises(KvCorrupt):
                await w.run()

    run(test)


def test_the_bytes_of_all_groups_are_counted() -> None:
    async def test() -> None:
        async with world() as w:
            task = asyncio.create_task(w.run())
            await task
            assert w.pull._pulled().kv_bytes == 6 * SPEC.block_bytes == w.ticket.kv_bytes

    run(test)


@pytest.mark.parametrize("group", [0, 1])
def test_one_wrong_bit_of_any_group_is_corrupt(group: int) -> None:
    async def test() -> None:
        def flip(ours: KvPool) -> None:
            ours.caches[group].blocks[OURS[group][3], 5] ^= 1

        async with world(damage=flip) as w:
            with pytest.raises(KvCorrupt):
                await w.run()
            assert w.link.table.num_held == 1, "another reader may read it"

    run(test)


def test_a_lender_that_dies_fails_the_read_and_all_groups_stop() -> None:
    async def test() -> None:
        async with world("int8") as w:
            running = asyncio.create_task(w.pull.run(wait_s=60))
            w.fabric.hold(LENDER)
            w.final(4 * SIZE)
            while not w.pull.read_in_flight:  # noqa: ASYNC110 - the pull posts it in a task of its own
                await asyncio.sleep(0.001)
            w.fabric.kill(LENDER)
            with pytest.raises(TransferFailed):
                await running
            if w.pull.stopped is not None:
                await w.pull.stopped
            assert not w.pull.read_in_flight

    run(test)


def first_group_only(patch: pytest.MonkeyPatch) -> None:
    """A pull that reads the first group only."""
    real = pulls.read_groups

    def read_groups(sources, peer, regions, remote, local, *, deadline_s):  # type: ignore[no-untyped-def]
        return real(sources[:1], peer, regions[:1], remote[:1], local[:1], deadline_s=deadline_s)

    patch.setattr(pulls, "read_groups", read_groups)


def sums_of_one_group(patch: pytest.MonkeyPatch) -> None:
    """A reader that forgets the checksums of the second group."""
    real = Reader._all_sums
    patch.setattr(Reader, "_all_sums", lambda self: real(self)[:1])


def groups_swapped(patch: pytest.MonkeyPatch) -> None:
    """A pull that names the blocks of one group in the other."""
    real = pulls.read_groups

    def read_groups(sources, peer, regions, remote, local, *, deadline_s):  # type: ignore[no-untyped-def]
        return real(sources, peer, regions, remote[::-1], local, deadline_s=deadline_s)

    patch.setattr(pulls, "read_groups", read_groups)


@pytest.mark.parametrize("mutant", [first_group_only, sums_of_one_group, groups_swapped])
@pytest.mark.parametrize("second", ["bfloat16", "int8"])
def test_a_handoff_that_forgets_a_group_is_never_ok(
    mutant: Callable[[pytest.MonkeyPatch], None], second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)

    async def test() -> None:
        async with world(second) as w:
            with pytest.raises((LeaseGone, KvCorrupt)):
                await w.run()
            assert w.link.table.num_held == 1

    run(test)
