"""What is used is what prefill wrote, read under the ticket that was written for it: the production services and pull."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest
from lender import FIRST, LAYOUT, PROMPT_HASH, TOKEN, Lender, lender
from test_lost_lender import BLOCKS, SEED, LenderProcess
from transfer_testing import Pool, new_incarnation

from decode_worker.role import InboundBlocks
from kvtransfer.api import KvRegion, Transport
from kvtransfer.backends.fake import FakeFabric, FakeTransport
from kvtransfer.backends.nixl import NixlTransport
from kvtransfer.lease_client import LeaseClient
from kvtransfer.routed import RoutedTransport
from kvtransfer.thread import TransferThread
from kvtransfer.ticket import Ticket, WrongTicket
from pdserve.config import EngineConfig, LeaseConfig, WorkerConfig
from pdserve.core.block_hash import prompt_hash
from pdserve.core.errors import IncompatiblePeer, InternalBug, KvCorrupt, KvRotted, LeaseGone, TransferFailed
from pdserve.core.ids import BlockId, BlockSum, Incarnation, LeaseId, ReaderId, WorkerId
from pdserve.core.kv_layout import KvSpec

REMOTE = (5, 3, 7, 1)
PROMPT_LEN = 3 * LAYOUT.block_size + 5
BOUND_S = 40.0


@dataclass
class Reader:
    """A decode worker, as far as a pull sees it. `damage` may change its pool before what was read is summed."""

    kv_spec: KvSpec
    regions: tuple[KvRegion, ...]
    config: WorkerConfig
    transfer: TransferThread
    pool: Pool
    client: LeaseClient
    staging: None = None
    damage: Callable[[Sequence[int]], None] = lambda _: None

    def sums(self, block_ids: Sequence[int], /) -> tuple[BlockSum, ...]:
        self.damage(block_ids)
        return self.pool.sums(block_ids)

    def inbound(self, blocks: int, *, prompt: bytes = PROMPT_HASH, hits: int = 0) -> InboundBlocks:
        local = tuple(BlockId(block) for block in range(blocks))
        reader_id = ReaderId(new_incarnation(), 1)
        return InboundBlocks(self, self.client, reader_id, (local,), prompt_hash=prompt, first_block=hits, wait_s=BOUND_S)


@asynccontextmanager
async def reader(make: Callable[[Incarnation, Pool], Transport], *, summed: bool = True) -> AsyncIterator[Reader]:
    """Nothing may be followed, in flight, summed or quarantined when the block ends."""
    pool, own = Pool(), new_incarnation()
    one: Reader | None = None

    def sums(block_ids: Sequence[int], /) -> tuple[BlockSum, ...]:
        assert one is not None
        return one.sums(block_ids)

    thread = TransferThread(
        lambda: RoutedTransport({0: make(own, pool)}), sum_blocks={KvRegion.of(LAYOUT, pool.region): sums} if summed else None
    )
    config = WorkerConfig("decode-0", "127.0.0.1:1", EngineConfig(model="tiny"), LeaseConfig(), cluster_token=TOKEN)
    try:
        await thread.start()
        client = LeaseClient(thread, config.lease, cluster_token=TOKEN)
        one = Reader(KvSpec((LAYOUT,)), (KvRegion.of(LAYOUT, pool.region),), config, thread, pool, client)
        yield one
        assert thread.num_unstopped == 0
        assert client.num_followed == 0
        await client.close()
    finally:
        await thread.close()


@asynccontextmanager
async def pair(*, summed: bool = True) -> AsyncIterator[tuple[Lender, Reader]]:
    fabric = FakeFabric()
    async with lender(fabric) as one, reader(lambda own, pool: FakeTransport(fabric, own, [pool.region]), summed=summed) as two:
        one.checksums = True
        yield one, two


async def pulled(two: Reader, lease_id: LeaseId, ticket: Ticket, **bind: object) -> None:
    """Pull, and give up what failed as a worker does."""
    inbound = two.inbound(ticket.num_blocks, **bind)  # type: ignore[arg-type]
    try:
        await asyncio.wait_for(inbound.pull(lease_id, ticket.encode()), BOUND_S)
    except BaseException:
        await inbound.abandon(release=True)
        raise


def computed(one: Lender, *, seal: bool = True) -> tuple[LeaseId, Ticket]:
    """A lease whose prompt is final."""
    lease_id, ticket = one.grant(REMOTE, PROMPT_LEN)
    one.advance(lease_id, PROMPT_LEN, FIRST)
    if seal:
        one.seal(lease_id)
    return lease_id, ticket


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 2 * BOUND_S))


def test_what_was_read_as_it_was_written_is_used() -> None:
    async def test() -> None:
        async with pair() as (one, two):
            await pulled(two, *computed(one))
            assert (two.pool.array[: len(REMOTE)] == one.peer.pool.array[list(REMOTE)]).all()
            assert one.table.num_held == 0
            assert one.service.corrupt_blocks == 0

    run(test)


def test_a_readers_own_hits_are_neither_read_nor_summed() -> None:
    async def test() -> None:
        async with pair() as (one, two):
            summed: list[int] = []
            two.damage = summed.extend
            await pulled(two, *computed(one), hits=2)
            assert summed == [2, 3]

    run(test)


def test_a_bit_that_flips_on_the_way_is_corrupt_and_the_lender_is_cleared() -> None:
    """(1) Flipped once: the pair is blamed; (2) the lease stood until its reader gave it up; (3) the next pull is right."""

    async def test() -> None:
        async with pair() as (one, two):
            two.damage = lambda block_ids: two.pool.flip(block_ids[-1])
            with pytest.raises(KvCorrupt, match="the lender still holds what it wrote"):
                await pulled(two, *computed(one))
            assert [lease.state.value for lease in one.returned] == ["released"]
            assert one.service.corrupt_blocks == 1
            two.damage = lambda _: None
            await pulled(two, *computed(one))

    run(test)


def test_a_block_that_rots_after_it_was_summed_is_the_lenders_fault() -> None:
    async def test() -> None:
        async with pair() as (one, two):
            lease_id, ticket = computed(one)
            one.peer.pool.flip(REMOTE[2])
            with pytest.raises(KvRotted, match="1 have changed in the lender's memory"):
                await pulled(two, lease_id, ticket)
            assert one.service.corrupt_blocks == 1

    run(test)


def test_a_commit_waits_for_the_lenders_own_checksums() -> None:
    async def test() -> None:
        async with pair() as (one, two):
            lease_id, ticket = computed(one, seal=False)
            pulling = asyncio.create_task(pulled(two, lease_id, ticket))
            while not one.calls.count.get("Commit"):  # noqa: ASYNC110 - of another server
                await asyncio.sleep(0.005)
            assert not pulling.done()
            one.seal(lease_id)
            await pulling

    run(test)


def test_a_commit_without_checksums_is_not_ok() -> None:
    async def test() -> None:
        async with pair(summed=False) as (one, two):
            with pytest.raises(LeaseGone):
                await pulled(two, *computed(one))

    run(test)


def test_a_lender_that_never_sums_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtransfer.lease_service.SUMS_WAIT_S", 0.05)

    async def test() -> None:
        async with pair() as (one, two):
            with pytest.raises(LeaseGone):
                await pulled(two, *computed(one, seal=False))

    run(test)


def test_a_sum_that_breaks_fails_its_request_alone() -> None:
    async def test() -> None:
        async with pair() as (one, two):

            def breaks(_: Sequence[int]) -> None:
                raise RuntimeError("no sum today")

            two.damage = breaks
            with pytest.raises(InternalBug, match="no sum today"):
                await pulled(two, *computed(one))
            two.damage = lambda _: None
            await pulled(two, *computed(one))

    run(test)


def test_workers_that_do_not_agree_on_checksums_read_nothing() -> None:
    async def test() -> None:
        async with pair() as (one, two):
            one.checksums = False
            with pytest.raises(IncompatiblePeer, match=r"lease\.kv_checksum"):
                await pulled(two, *computed(one, seal=False))
            assert not two.pool.array.any()

    run(test)


# --- tickets


def forged(ticket: Ticket, _: Ticket) -> Ticket:
    """By one who knows everything but the lender's secret."""
    return ticket.with_mac(b"a guess")


def without_mac(ticket: Ticket, _: Ticket) -> Ticket:
    return replace(ticket, mac=bytes(32))


def reordered(ticket: Ticket, _: Ticket) -> Ticket:
    return replace(ticket, block_tables=(ticket.block_tables[0][::-1],))


def moved(ticket: Ticket, _: Ticket) -> Ticket:
    """The same blocks of another region of the same process."""
    (region,) = ticket.regions
    ((_, memory),) = region.parts
    elsewhere = replace(memory, address=memory.address + memory.block_bytes, num_blocks=memory.num_blocks - 1)
    return replace(ticket, regions=(KvRegion.of(region.group, elsewhere),))


def anothers_blocks(ticket: Ticket, other: Ticket) -> Ticket:
    return replace(ticket, block_tables=other.block_tables)


def anothers_mac(ticket: Ticket, other: Ticket) -> Ticket:
    return replace(ticket, mac=other.mac)


def replayed(ticket: Ticket, other: Ticket) -> Ticket:
    """A ticket of an earlier lease, with the name of this one."""
    return replace(other, lease_counter=ticket.lease_counter)


@pytest.mark.parametrize("change", [forged, without_mac, reordered, moved, anothers_blocks, anothers_mac, replayed])
@pytest.mark.parametrize("checksums", [True, False])
def test_a_ticket_that_was_not_written_for_its_lease_reads_nothing(
    change: Callable[[Ticket, Ticket], Ticket], checksums: bool
) -> None:
    """(1) Nothing is read, nor renewed, nor released; (2) the true one works as before."""

    async def test() -> None:
        async with pair(summed=checksums) as (one, two):
            one.checksums = checksums
            two.config = replace(two.config, lease=replace(two.config.lease, kv_checksum=checksums))
            other_id, other = one.grant((2, 4, 6, 8), PROMPT_LEN)
            lease_id, ticket = computed(one, seal=checksums)
            with pytest.raises(LeaseGone):
                await pulled(two, lease_id, change(ticket, other))
            assert not two.pool.array.any()
            assert one.table.num_held == 2
            await pulled(two, lease_id, ticket)
            one.table.release(other_id, now_s=one.now_s())
            one.expire_due()

    run(test)


def test_the_ticket_of_another_prompt_or_lease_is_refused_before_the_lender_is_asked() -> None:
    async def test() -> None:
        async with pair() as (one, two):
            lease_id, ticket = computed(one)
            for salted in (prompt_hash(b"\x01\x00\x00\x00", ""), prompt_hash(b"", "another tenant")):
                with pytest.raises(WrongTicket, match="another prompt"):
                    await pulled(two, lease_id, ticket, prompt=salted)
            with pytest.raises(WrongTicket, match="of lease"):
                await pulled(two, LeaseId(lease_id.incarnation, 99), ticket)
            assert not one.calls.count
            assert not two.pool.array.any()
            await pulled(two, lease_id, ticket)

    run(test)


def test_a_rebind_reads_under_the_same_ticket() -> None:
    """The ticket names no reader: what fixes the one reader is Commit."""

    async def test() -> None:
        fabric = FakeFabric()

        def make(own: Incarnation, pool: Pool) -> Transport:
            return FakeTransport(fabric, own, [pool.region])

        async with lender(fabric) as one, reader(make) as two, reader(make) as three:
            one.checksums = True
            lease_id, ticket = computed(one)
            await pulled(two, lease_id, ticket)
            with pytest.raises(LeaseGone):
                await pulled(three, lease_id, ticket)

    run(test)


def test_a_follower_with_a_forged_ticket_takes_nothing_from_one_with_the_true_one() -> None:
    """Both on one link, at the same time."""

    async def test() -> None:
        async with pair() as (one, two):
            lease_id, ticket = one.grant(REMOTE, PROMPT_LEN)
            true = asyncio.create_task(pulled(two, lease_id, ticket))
            while two.client.num_followed == 0:  # noqa: ASYNC110 - of another task
                await asyncio.sleep(0.005)
            with pytest.raises(LeaseGone):
                await pulled(two, lease_id, forged(ticket, ticket))
            assert not true.done()
            one.advance(lease_id, PROMPT_LEN, FIRST)
            one.seal(lease_id)
            await true

    run(test)


# --- over NIXL, between processes


def test_flipped_bits_are_found_between_processes() -> None:
    """(1) As written: OK. (2) A bit flips in what was read: corrupt. (3) A bit flips in the lender: rotted. (4) OK again."""
    pytest.importorskip("nixl", reason="NIXL is not installed")
    tokens = len(BLOCKS) * LAYOUT.block_size

    async def test() -> None:
        with LenderProcess() as peer:
            async with reader(lambda own, pool: NixlTransport(WorkerId("reader"), own, [pool.region])) as two:
                peer.ask("checksums")

                async def one_pull(flip: int | None = None) -> None:
                    lease_id, ticket = peer.grant()
                    peer.ask("advance", lease_id.counter, tokens, "last")
                    peer.ask("seal", lease_id.counter)
                    if flip is not None:
                        peer.ask("flip", flip)
                    await pulled(two, lease_id, Ticket.decode(ticket))

                await one_pull()
                assert (two.pool.array[: len(BLOCKS)] == Pool(seed=SEED).array[list(BLOCKS)]).all()
                two.damage = lambda block_ids: two.pool.flip(block_ids[0])
                with pytest.raises(KvCorrupt):
                    await one_pull()
                two.damage = lambda _: None
                with pytest.raises(KvRotted):
                    await one_pull(flip=BLOCKS[3])
                await one_pull()
                assert peer.ask("corrupt_blocks") == {"count": 2}

    run(test)


def test_a_read_that_fails_is_not_summed() -> None:
    async def test() -> None:
        async with pair() as (one, two):
            lease_id, ticket = computed(one)
            one.peer.kill()
            summed: list[int] = []
            two.damage = summed.extend
            with pytest.raises(TransferFailed):
                await pulled(two, lease_id, ticket)
            assert not summed
            one.expire_due()

    run(test)
