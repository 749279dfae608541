"""Reads through staging blocks: every byte, who holds what meanwhile, and what is left when a step fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from lender import FIRST, LAYOUT, TOKEN, Lender, lender, ticket_of
from transfer_testing import BLOCK_BYTES, FakePeer, NixlPeer, Pool, new_incarnation

from kvtransfer.api import KvRegion
from kvtransfer.backends.fake import FakeFabric, FakeTransport
from kvtransfer.backends.nixl import NixlTransport
from kvtransfer.lease_client import LeaseClient
from kvtransfer.pull import Pull
from kvtransfer.routed import RoutedTransport, pack_metadata
from kvtransfer.staging import Staging
from kvtransfer.thread import BlockRead, TransferThread
from pdserve.config import LeaseConfig
from pdserve.core.errors import InternalBug, LeaseGone, TransferFailed
from pdserve.core.ids import BlockId, BlockSum, LeaseId, ReaderId, WorkerId
from pdserve.core.kv_layout import KvSpec

CONFIG = LeaseConfig()
SLOTS, CHUNK = 8, 2
LATE_S = 2.5  # longer than a busy machine stands still, so that a read is posted before it is late
CONVERTER = "pdserve-convert"


class Halves:
    """A format of half the bytes: every second byte, of the tokens that are there. Notes what it was asked, and waits
    while `may_convert` is not set."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.staged = Pool(num_blocks=SLOTS)
        self.may_convert = threading.Event()
        self.may_convert.set()
        self.tokens: list[int] = []
        self.bug: Exception | None = None

    @property
    def region(self) -> KvRegion:
        return KvRegion.of(LAYOUT, self.staged.region)

    def sums(self, staged: Sequence[int], /) -> tuple[BlockSum, ...]:
        assert threading.current_thread().name.startswith(CONVERTER)
        return self.staged.sums(staged)

    def convert(self, staged: Sequence[int], local: Sequence[int], tokens: int) -> None:
        assert threading.current_thread().name.startswith(CONVERTER)
        self.tokens.append(tokens)
        assert self.may_convert.wait(30)
        if self.bug is not None:
            raise self.bug
        for source, target in zip(staged, local, strict=True):
            self.pool.array[target] = self.staged.array[source][::2]


@dataclass
class World:
    fabric: FakeFabric
    peers: list[FakePeer]
    pool: Pool
    halves: Halves
    thread: TransferThread
    staging: Staging

    def read(
        self, remote: Sequence[int], local: Sequence[int], *, peer: int = 0, deadline_s: float = 30.0, tail: int = 0
    ) -> BlockRead:
        """`tail`: tokens that the last block lacks."""
        other = self.peers[peer]
        blocks = tuple(BlockId(block) for block in remote)
        lease_id = LeaseId(other.incarnation, 1)
        ticket = ticket_of(lease_id, other.region, blocks, len(blocks) * LAYOUT.block_size - tail)
        return self.staging.source_for(ticket, 0).read(
            other.incarnation, ticket.regions[0], blocks, local, deadline_s=deadline_s
        )

    def arrived(self, remote: Iterable[int], local: Iterable[int], *, peer: int = 0) -> bool:
        pairs = list(zip(remote, local, strict=True))
        return all((self.pool.array[b] == self.peers[peer].pool.array[a][::2]).all() for a, b in pairs)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 - of several threads
            await asyncio.sleep(0.001)


@asynccontextmanager
async def world(*, stuck_after_s: float = 60.0, clean: bool = True) -> AsyncIterator[World]:
    """Two peers whose blocks are twice as large as ours. In the end nothing is held; if not `clean`, once all is closed."""
    fabric, pool = FakeFabric(), Pool(block_bytes=BLOCK_BYTES // 2)
    peers = [FakePeer(fabric, seed=seed) for seed in (1, 2)]
    halves = Halves(pool)
    thread = TransferThread(
        lambda: RoutedTransport({0: FakeTransport(fabric, new_incarnation(), [pool.region])}), stuck_after_s=stuck_after_s
    )
    staging = Staging(thread, lambda *_: halves, num_blocks=SLOTS, chunk_blocks=CHUNK, stuck_after_s=stuck_after_s)
    try:
        await thread.start()
        for peer in peers:
            await thread.connect(peer.incarnation, pack_metadata({0: peer.metadata}))
        yield World(fabric, peers, pool, halves, thread, staging)
        assert not clean or staging.idle
    finally:
        halves.may_convert.set()
        await thread.close()
        staging.close()
    assert thread.num_unstopped == 0
    await asyncio.to_thread(lambda: [t.join(60) for t in threading.enumerate() if t.name.startswith(CONVERTER)])
    assert not [t for t in threading.enumerate() if t.name.startswith(CONVERTER)]


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_every_block_arrives_converted_though_there_are_more_than_staging_holds() -> None:
    async def test() -> None:
        async with world() as w:
            remote, local = list(range(47, 10, -1)), list(range(37))
            result = await (read := w.read(remote, local)).result
            assert read.is_stopped
            assert w.arrived(remote, local)
            assert not w.pool.array[37:].any()
            assert result.nbytes == 37 * BLOCK_BYTES, "of the peer's blocks, as they came over the wire"

    run(test)


@pytest.mark.parametrize("tail", [0, 1, LAYOUT.block_size - 1])
def test_only_the_last_block_of_the_prompt_is_short(tail: int) -> None:
    """Read in two parts, as when chunks of a prompt become final one after the other."""

    async def test() -> None:
        async with world() as w:
            await w.read([5, 6, 7], [0, 1, 2], tail=tail).result
            assert w.halves.tokens == [2 * LAYOUT.block_size, LAYOUT.block_size - tail]

    run(test)


def test_many_reads_of_two_peers_share_the_staging_blocks() -> None:
    async def test() -> None:
        async with world() as w:
            w.fabric.polls_until_done = 2
            reads = [w.read([i, i + 8, i + 16], [3 * i, 3 * i + 1, 3 * i + 2], peer=i % 2) for i in range(16)]
            await asyncio.gather(*(read.result for read in reads))
            for i in range(16):
                assert w.arrived([i, i + 8, i + 16], [3 * i, 3 * i + 1, 3 * i + 2], peer=i % 2)
            await w.until(lambda: w.staging.idle)

    run(test)


def test_a_staging_block_that_a_read_may_still_write_is_not_used_again() -> None:
    """(1) The peer stalls past the deadline: failed, not stopped; (2) its blocks stay taken; (3) it goes on: they are free,
    and nothing was converted."""

    async def test() -> None:
        async with world() as w:
            w.fabric.hold(w.peers[0].incarnation)
            read = w.read([1, 2], [3, 4], deadline_s=LATE_S)
            await w.until(lambda: w.staging.num_held == 2)
            with pytest.raises(TransferFailed):
                await read.result
            await asyncio.sleep(0.01)
            assert not read.is_stopped
            assert w.staging.num_held == 2
            w.fabric.resume(w.peers[0].incarnation)
            await read.stopped
            assert w.staging.num_held == 0
            assert w.halves.tokens == []
            assert not w.pool.array.any()

    run(test)


def test_a_lender_that_stands_still_leaves_room_for_the_others() -> None:
    async def test() -> None:
        async with world() as w:
            w.fabric.hold(w.peers[0].incarnation)
            stalled = w.read(range(10), range(10), deadline_s=LATE_S)
            await w.until(lambda: w.staging.num_held == SLOTS // 2)
            await w.read(range(12), range(20, 32), peer=1).result
            assert w.arrived(range(12), range(20, 32), peer=1)
            with pytest.raises(TransferFailed):
                await stalled.result
            w.fabric.resume(w.peers[0].incarnation)
            await stalled.stopped

    run(test)


def test_waiting_in_line_ends_at_the_deadline_and_holds_nothing() -> None:
    async def test() -> None:
        async with world() as w:
            w.halves.may_convert.clear()
            first = w.read(range(4), range(4))
            await w.until(lambda: w.staging.num_held == SLOTS // 2)
            second = w.read([9], [9], deadline_s=0.05)
            with pytest.raises(TransferFailed, match=r"0\.1 s|0\.0 s"):
                await second.result
            await second.stopped
            assert w.staging.num_held == SLOTS // 2
            w.halves.may_convert.set()
            await first.result

    run(test)


def test_an_abort_waits_for_the_conversion_that_runs_and_posts_no_more() -> None:
    """(1) A chunk is being converted, others wait; (2) the asker leaves; (3) stopped only when the converter is done."""

    async def test() -> None:
        async with world() as w:
            w.halves.may_convert.clear()
            read = w.read(range(20), range(20))
            await w.until(lambda: bool(w.halves.tokens))
            read.give_up()
            await asyncio.sleep(0.02)
            assert not read.is_stopped
            w.halves.may_convert.set()
            await read.stopped
            assert len(w.halves.tokens) == 1, "nobody waits for the rest"
            assert w.pool.array[:CHUNK].any(axis=1).all()
            assert not w.pool.array[CHUNK:].any(), "written after the abort"

    run(test)


def test_a_peer_that_dies_fails_the_read_and_frees_its_blocks() -> None:
    async def test() -> None:
        async with world() as w:
            w.fabric.hold(w.peers[0].incarnation)
            read = w.read(range(20), range(20))
            await w.until(lambda: w.staging.num_held > 0)
            w.peers[0].kill()
            with pytest.raises(TransferFailed):
                await read.result
            await read.stopped
            assert w.staging.num_held == 0

    run(test)


def test_a_bug_of_the_converter_fails_its_read_alone() -> None:
    async def test() -> None:
        async with world() as w:
            w.halves.bug = ZeroDivisionError("a bug")
            read = w.read([1], [1])
            with pytest.raises(InternalBug, match="a bug"):
                await read.result
            await read.stopped
            w.halves.bug = None
            await w.read([1], [1]).result
            assert w.arrived([1], [1])

    run(test)


def test_a_conversion_that_does_not_end_makes_the_worker_unhealthy() -> None:
    """It may write our blocks for ever: only an end of the process helps."""

    async def test() -> None:
        async with world(stuck_after_s=0.05) as w:
            w.halves.may_convert.clear()
            read = w.read([1], [2])
            await w.thread.unhealthy.wait()
            assert "conversion" in w.thread.unhealthy_reason
            assert not read.is_stopped
            w.halves.may_convert.set()
            await read.stopped

    run(test)


def test_a_read_adrift_keeps_its_staging_blocks_until_the_transport_is_closed() -> None:
    async def test() -> None:
        async with world(stuck_after_s=0.05, clean=False) as w:
            w.fabric.set_adrift(w.peers[0].incarnation)
            read = w.read([1], [2])
            with pytest.raises(TransferFailed):
                await read.result
            await w.thread.unhealthy.wait()
            assert not read.is_stopped
            assert w.staging.num_held == 1
            await w.thread.close()
            await read.stopped
            assert w.staging.num_held == 0

    run(test)


def test_a_transport_that_takes_no_more_reads_fails_the_read() -> None:
    async def test() -> None:
        async with world() as w:
            await w.thread.close()
            read = w.read(range(6), range(6))
            with pytest.raises(TransferFailed, match="closing"):
                await read.result
            await read.stopped

    run(test)


def test_what_waits_counts_for_the_next_deadline() -> None:
    async def test() -> None:
        async with world() as w:
            ticket = ticket_of(LeaseId(w.peers[0].incarnation, 1), w.peers[0].region, (BlockId(0),), 1)
            reads = w.staging.source_for(ticket, 0)
            alone_s = reads.deadline_s(w.peers[0].incarnation, BLOCK_BYTES, CONFIG)
            w.halves.may_convert.clear()
            waiting = w.read(range(40), range(40))
            await w.until(lambda: bool(w.halves.tokens))
            behind_s = reads.deadline_s(w.peers[0].incarnation, BLOCK_BYTES, CONFIG)
            assert behind_s > alone_s + 4 * 30 * BLOCK_BYTES / CONFIG.transfer_bandwidth_bytes_s
            w.halves.may_convert.set()
            await waiting.result
            assert reads.deadline_s(w.peers[0].incarnation, 0, CONFIG) == CONFIG.transfer_deadline_floor_s, "nothing waits"

    run(test)


@asynccontextmanager
async def pull_of(one: Lender, thread: TransferThread, reads: Staging, remote: Sequence[int]) -> AsyncIterator[Pull]:
    """A pull of whole blocks into blocks 0, 1, ... whose prompt is final."""
    own = new_incarnation()
    await thread.start()
    client = LeaseClient(thread, CONFIG, cluster_token=TOKEN)
    lease_id, ticket = one.grant(tuple(remote), len(remote) * LAYOUT.block_size)
    ticket.check_layout(KvSpec((replace(LAYOUT, dtype="int8"),)))
    if one.checksums:
        one.seal(lease_id)
    lease = await client.attach(lease_id, ticket, deadline_s=30)
    try:
        yield Pull(lease, ticket, [range(len(remote))], ReaderId(own, 1), [reads.source_for(ticket, 0)], CONFIG)
    finally:
        one.table.release(lease_id, now_s=one.now_s())
        one.expire_due()
        lease.close()
        await client.close()


def test_what_is_staged_is_summed_as_it_was_sent() -> None:
    """The lender's checksums are of its own form; ours is another, and half as long."""

    async def test() -> None:
        fabric, pool = FakeFabric(), Pool(block_bytes=BLOCK_BYTES // 2)
        halves = Halves(pool)
        thread = TransferThread(lambda: RoutedTransport({0: FakeTransport(fabric, new_incarnation(), [pool.region])}))
        staging = Staging(thread, lambda *_: halves, num_blocks=SLOTS, chunk_blocks=CHUNK)
        try:
            async with lender(fabric) as one:
                one.checksums = True
                async with pull_of(one, thread, staging, range(4, 14)) as pull:
                    one.advance(pull._lease.lease_id, 10 * LAYOUT.block_size, FIRST)
                    pulled = await pull.run(wait_s=30)
                assert pulled.blocks == 10
                assert one.service.corrupt_blocks == 0
        finally:
            await thread.close()
            staging.close()

    run(test)


def test_a_handoff_through_staging_commits_when_all_is_converted() -> None:
    async def test() -> None:
        fabric, pool = FakeFabric(), Pool(block_bytes=BLOCK_BYTES // 2)
        halves = Halves(pool)
        thread = TransferThread(lambda: RoutedTransport({0: FakeTransport(fabric, new_incarnation(), [pool.region])}))
        staging = Staging(thread, lambda *_: halves, num_blocks=SLOTS, chunk_blocks=CHUNK)
        remote = range(20, 30)
        async with lender(fabric) as one, pull_of(one, thread, staging, remote) as pull:
            halves.may_convert.clear()
            running = asyncio.create_task(pull.run(wait_s=30))
            one.advance(pull._lease.lease_id, 10 * LAYOUT.block_size, FIRST)
            while not halves.tokens:  # noqa: ASYNC110 - the converter's thread
                await asyncio.sleep(0.001)
            assert "Commit" not in one.calls.count
            halves.may_convert.set()
            pulled = await running
            assert pulled.kv_bytes == 10 * BLOCK_BYTES
            assert all((pool.array[i] == one.peer.pool.array[block][::2]).all() for i, block in enumerate(remote))
            assert staging.idle
        await thread.close()
        staging.close()

    run(test)


def test_a_lease_that_ends_while_blocks_are_converted_ends_the_pull_but_not_the_conversion() -> None:
    """(1) The converter works; (2) the lease is gone, no Commit; (3) `stopped` is pending until the converter is done."""

    async def test() -> None:
        fabric, pool = FakeFabric(), Pool(block_bytes=BLOCK_BYTES // 2)
        halves = Halves(pool)
        thread = TransferThread(lambda: RoutedTransport({0: FakeTransport(fabric, new_incarnation(), [pool.region])}))
        staging = Staging(thread, lambda *_: halves, num_blocks=SLOTS, chunk_blocks=CHUNK)
        async with lender(fabric) as one, pull_of(one, thread, staging, range(6)) as pull:
            halves.may_convert.clear()
            running = asyncio.create_task(pull.run(wait_s=30))
            one.advance(pull._lease.lease_id, 6 * LAYOUT.block_size, FIRST)
            while not halves.tokens:  # noqa: ASYNC110 - the converter's thread
                await asyncio.sleep(0.001)
            one.table.release(pull._lease.lease_id, now_s=one.now_s())
            one.expire_due()
            with pytest.raises(LeaseGone):
                await running
            assert "Commit" not in one.calls.count
            stopped = pull.stopped
            assert stopped is not None
            await asyncio.sleep(0.02)
            assert not stopped.done()
            halves.may_convert.set()
            await stopped
            assert staging.idle
        await thread.close()
        staging.close()

    run(test)


def test_staging_over_nixl_from_another_process() -> None:
    pytest.importorskip("nixl", reason="NIXL is not installed")

    async def test() -> None:
        remote, pool = NixlPeer(seed=3), Pool(block_bytes=BLOCK_BYTES // 2)
        expected = Pool(seed=3)
        assert expected.digest([0]) == remote.digest([0])
        halves = Halves(pool)
        thread = TransferThread(
            lambda: RoutedTransport({0: NixlTransport(WorkerId("reader"), new_incarnation(), [pool.region])})
        )
        staging = Staging(thread, lambda *_: halves, num_blocks=SLOTS, chunk_blocks=CHUNK)
        try:
            async with lender(FakeFabric(), incarnation=remote.incarnation) as one:
                one.peer.region, one.peer.metadata = remote.region, remote.metadata
                await one.stop()
                await one.serve()
                async with pull_of(one, thread, staging, range(10, 42)) as pull:
                    one.advance(pull._lease.lease_id, 32 * LAYOUT.block_size, FIRST)
                    pulled = await pull.run(wait_s=30)
            assert pulled.kv_bytes == 32 * BLOCK_BYTES
            assert (pool.array[:32] == expected.array[10:42, ::2]).all()
            assert staging.idle
        finally:
            await thread.close()
            staging.close()
            remote.kill()

    run(test)
