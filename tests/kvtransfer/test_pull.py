"""The whole handoff: a lease followed over gRPC, its blocks read, the commit; and what is left when a step fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from lender import FIRST, LAYOUT, TOKEN, Lender, lender
from transfer_testing import FakePeer, NixlPeer, Pool, new_incarnation

from kvtransfer.api import KvRegion
from kvtransfer.backends.fake import FakeFabric, FakeTransport
from kvtransfer.backends.nixl import NixlTransport
from kvtransfer.lease_client import LeaseClient
from kvtransfer.pull import Pull
from kvtransfer.routed import RoutedTransport
from kvtransfer.thread import PoolSource, TransferThread
from pdserve.config import LeaseConfig
from pdserve.core.errors import DeadlineExceeded, InternalBug, LeaseGone, ReplicaLost, TransferFailed
from pdserve.core.ids import LeaseId, ReaderId, WorkerId
from pdserve.core.kv_layout import KvSpec
from pdserve.core.lease import LeaseState

CONFIG = LeaseConfig()
HASTY = LeaseConfig(transfer_deadline_floor_s=0.3, transfer_bandwidth_bytes_s=1e12)


@dataclass
class World:
    fabric: FakeFabric
    lender: Lender
    pool: Pool
    thread: TransferThread
    client: LeaseClient
    config: LeaseConfig
    num_binds: int = 0

    @asynccontextmanager
    async def pull(self, remote: tuple[int, ...], local: list[int]) -> AsyncIterator[tuple[Pull, LeaseId]]:
        """A pull of whole blocks whose prompt is not computed yet."""
        lease_id, ticket = self.lender.grant(remote, len(remote) * LAYOUT.block_size)
        ticket.check_layout(KvSpec((LAYOUT,)))
        lease = await self.client.attach(lease_id, ticket, deadline_s=30)
        self.num_binds += 1
        try:
            yield (
                Pull(lease, ticket, [local], ReaderId(new_incarnation(), self.num_binds), [self.source], self.config),
                lease_id,
            )
        finally:
            lease.close()

    @property
    def source(self) -> PoolSource:
        return PoolSource(self.thread, KvRegion.of(LAYOUT, self.pool.region))

    def finish_prefill(self, lease_id: LeaseId, blocks: int) -> None:
        self.lender.advance(lease_id, blocks * LAYOUT.block_size, FIRST)


@asynccontextmanager
async def world(config: LeaseConfig = CONFIG) -> AsyncIterator[World]:
    fabric, pool, own = FakeFabric(), Pool(), new_incarnation()
    async with lender(fabric) as one:
        thread = TransferThread(lambda: RoutedTransport({0: FakeTransport(fabric, own, [pool.region])}))
        await thread.start()
        client = LeaseClient(thread, config, cluster_token=TOKEN)
        try:
            yield World(fabric, one, pool, thread, client, config)
        finally:
            await client.close()
            await thread.close()
        assert client.num_followed == 0
        assert thread.num_unstopped == 0
        assert one.table.num_held == 0


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_handoff_moves_every_byte_and_returns_the_lease_once() -> None:
    """(1) Start before prefill is done; (2) prefill ends; (3) read, commit; (4) bytes equal, lease COMMITTED, once."""

    async def test() -> None:
        async with world() as w, w.pull((5, 9, 2), [1, 0, 7]) as (pull, lease_id):
            running = asyncio.create_task(pull.run(wait_s=30))
            await asyncio.sleep(0)
            w.finish_prefill(lease_id, 3)
            pulled = await running
            assert pulled.first_token == FIRST
            assert (pulled.blocks, pulled.kv_bytes) == (3, 3 * LAYOUT.block_bytes)
            assert pulled.exposed_s >= pulled.commit_s > 0
            assert pull.stopped is None
            assert w.pool.digest([1, 0, 7]) == w.lender.peer.digest([5, 9, 2])
            assert [lease.state for lease in w.lender.returned] == [LeaseState.COMMITTED]

    run(test)


def test_many_handoffs_at_once() -> None:
    async def test() -> None:
        async with world() as w:
            w.fabric.polls_until_done = 3

            async def one(i: int) -> None:
                async with w.pull((i, i + 16), [i + 16, i]) as (pull, lease_id):
                    w.finish_prefill(lease_id, 2)
                    await pull.run(wait_s=30)

            await asyncio.gather(*(one(i) for i in range(16)))
            assert w.pool.digest([*range(16, 32), *range(16)]) == w.lender.peer.digest(list(range(32)))
            assert len(w.lender.returned) == 16

    run(test)


def test_prefill_that_does_not_finish_is_given_up() -> None:
    async def test() -> None:
        async with world() as w, w.pull((1,), [1]) as (pull, lease_id):
            w.lender.advance(lease_id, 10)
            with pytest.raises(DeadlineExceeded, match="of 64 tokens"):
                await pull.run(wait_s=0.05)
            assert pull.stopped is None
            w.lender.table.release(lease_id, now_s=w.lender.now_s())
            w.lender.expire_due()

    run(test)


def test_a_lease_that_ends_during_prefill_fails_before_reading() -> None:
    async def test() -> None:
        async with world() as w, w.pull((1,), [1]) as (pull, lease_id):
            running = asyncio.create_task(pull.run(wait_s=30))
            w.lender.table.release(lease_id, now_s=w.lender.now_s())
            w.lender.expire_due()
            with pytest.raises(LeaseGone):
                await running
            assert pull.stopped is None

    run(test)


def test_a_lease_that_ends_during_the_read_ends_the_pull_but_not_the_read() -> None:
    """(1) The read stalls; (2) the lease is released: LeaseGone, no Commit; (3) what it wrote to is out of use till it ends."""

    async def test() -> None:
        async with world() as w, w.pull((1,), [1]) as (pull, lease_id):
            w.fabric.hold(w.lender.peer.incarnation)
            w.finish_prefill(lease_id, 1)
            running = asyncio.create_task(pull.run(wait_s=30))
            while w.thread.num_unstopped == 0:  # noqa: ASYNC110 - the read is posted by the task under test
                await asyncio.sleep(0.001)
            w.lender.table.release(lease_id, now_s=w.lender.now_s())
            w.lender.expire_due()
            with pytest.raises(LeaseGone):
                await running
            assert "Commit" not in w.lender.calls.count
            stopped = pull.stopped
            assert stopped is not None
            w.fabric.resume(w.lender.peer.incarnation)
            await stopped
            assert pull.stopped is None

    run(test)


def test_the_chunks_of_a_prompt_arrive_while_the_next_are_computed() -> None:
    """(1) Four chunks of two blocks, each final only when the one before has been read; (2) every byte is here."""

    async def test() -> None:
        remote, local = tuple(range(8)), list(range(20, 28))
        async with world() as w, w.pull(remote, local) as (pull, lease_id):
            running = asyncio.create_task(pull.run(wait_s=30))
            for blocks in (2, 4, 6):
                w.lender.advance(lease_id, blocks * LAYOUT.block_size)
                # Bytes have no event, and the thread that moved them tells of the read a moment later.
                while w.pool.digest(local[:blocks]) != w.lender.peer.digest(remote[:blocks]) or w.thread.num_unstopped:  # noqa: ASYNC110
                    await asyncio.sleep(0.002)
            assert not w.pool.array[local[6:]].any()
            w.finish_prefill(lease_id, 8)
            pulled = await running
            assert (pulled.reads, pulled.exposed_bytes) == (4, 2 * LAYOUT.block_bytes)
            assert w.pool.digest(local) == w.lender.peer.digest(remote)

    run(test)


def test_a_read_past_its_deadline_never_commits_and_says_what_it_still_holds() -> None:
    """(1) The transfer stalls past its deadline; (2) no Commit; (3) `stopped` is pending; (4) the peer resumes: stopped."""

    async def test() -> None:
        async with world(HASTY) as w, w.pull((1,), [1]) as (pull, lease_id):
            w.fabric.hold(w.lender.peer.incarnation)
            w.finish_prefill(lease_id, 1)
            with pytest.raises(TransferFailed, match="took more than"):
                await pull.run(wait_s=30)
            stopped = pull.stopped
            assert stopped is not None
            assert not stopped.done()
            assert "Commit" not in w.lender.calls.count
            w.fabric.resume(w.lender.peer.incarnation)
            await stopped
            assert pull.stopped is None
            w.lender.table.release(lease_id, now_s=w.lender.now_s())
            w.lender.expire_due()

    run(test)


def test_a_cancelled_pull_says_what_it_still_holds() -> None:
    async def test() -> None:
        async with world() as w, w.pull((1,), [1]) as (pull, lease_id):
            w.fabric.hold(w.lender.peer.incarnation)
            w.finish_prefill(lease_id, 1)
            running = asyncio.create_task(pull.run(wait_s=30))
            while w.thread.num_unstopped == 0:  # noqa: ASYNC110 - the read is posted by the task under test
                await asyncio.sleep(0.001)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            stopped = pull.stopped
            assert stopped is not None
            w.fabric.resume(w.lender.peer.incarnation)
            await stopped
            w.lender.table.release(lease_id, now_s=w.lender.now_s())
            w.lender.expire_due()

    run(test)


@pytest.mark.parametrize("failing", range(1, 4))
def test_commits_that_fail(failing: int) -> None:
    """One or two lost calls are repeated; the third is the last."""

    async def test() -> None:
        async with world() as w, w.pull((1,), [1]) as (pull, lease_id):
            w.lender.calls.failures["Commit"] = failing
            w.finish_prefill(lease_id, 1)
            if failing < 3:
                await pull.run(wait_s=30)
                return
            with pytest.raises(ReplicaLost):
                await pull.run(wait_s=30)
            w.lender.table.release(lease_id, now_s=w.lender.now_s())
            w.lender.expire_due()

    run(test)


def test_a_peer_that_was_lost_is_connected_anew() -> None:
    """(1) The connection breaks during a read; (2) the pool is reachable again; (3) the next handoff works."""

    async def test() -> None:
        async with world() as w:
            async with w.pull((1,), [1]) as (pull, lease_id):
                w.fabric.kill(w.lender.peer.incarnation)
                w.finish_prefill(lease_id, 1)
                with pytest.raises(TransferFailed):
                    await pull.run(wait_s=30)
                w.lender.table.release(lease_id, now_s=w.lender.now_s())
                w.lender.expire_due()
            w.fabric.attach(w.lender.peer.incarnation, [w.lender.peer.region])
            async with w.pull((2,), [3]) as (pull, lease_id):
                w.finish_prefill(lease_id, 1)
                await pull.run(wait_s=30)
            assert w.pool.digest([3]) == w.lender.peer.digest([2])
            assert w.lender.calls.count["Handshake"] == 1

    run(test)


def test_blocks_that_do_not_pair_up_are_our_bug() -> None:
    async def test() -> None:
        async with world() as w, w.pull((1, 2), [1, 2]) as (pull, lease_id):
            with pytest.raises(InternalBug):
                Pull(pull._lease, pull._ticket, [[1]], pull._reader_id, [w.source], w.config)
            w.finish_prefill(lease_id, 2)
            await pull.run(wait_s=30)

    run(test)


def test_a_handoff_over_nixl_from_another_process() -> None:
    """The lender's bytes lie in a process of their own; its lease service runs here."""
    pytest.importorskip("nixl", reason="NIXL is not installed")

    async def test() -> None:
        remote, pool, own = NixlPeer(seed=3), Pool(), new_incarnation()
        thread = TransferThread(lambda: RoutedTransport({0: NixlTransport(WorkerId("reader"), own, [pool.region])}))
        try:
            async with lender(FakeFabric(), incarnation=remote.incarnation) as one:
                one.peer.region, one.peer.metadata = remote.region, remote.metadata
                await one.stop()
                await one.serve()
                await thread.start()
                client = LeaseClient(thread, CONFIG, cluster_token=TOKEN)
                w = World(FakeFabric(), one, pool, thread, client, CONFIG)
                async with w.pull(tuple(range(10, 42)), list(range(32))) as (pull, lease_id):
                    w.finish_prefill(lease_id, 32)
                    pulled = await pull.run(wait_s=30)
                await client.close()
            assert pulled.kv_bytes == 32 * LAYOUT.block_bytes
            assert pool.digest(list(range(32))) == remote.digest(list(range(10, 42)))
        finally:
            await thread.close()
            remote.kill()

    run(test)


def test_fake_peers_differ_by_seed() -> None:
    """Guards the comparisons above: two pools of equal bytes would prove nothing."""
    fabric = FakeFabric()
    assert FakePeer(fabric, seed=1).digest([0]) != FakePeer(fabric, seed=2).digest([0])
