"""The lender's Watch streams: what is pushed, what is dropped, what is refused; the versions at the handshake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from lender import FIRST, TOKEN, Lender, lender
from test_lease_client import run, world
from transfer_testing import new_incarnation

import kvtransfer.lease_client
import kvtransfer.lease_service
from kvtransfer.backends.fake import FakeFabric
from kvtransfer.lease_service import MAX_RENEWALS, MAX_WATCHED, TooManyWatched, Watcher, Watchers
from pdserve.core.errors import IncompatiblePeer
from pdserve.core.ids import LeaseId
from pdserve.core.lease import LeaseView
from pdserve.core.worker import VersionRange
from pdserve.rpc import codec
from pdserve.rpc.channel import open_channel, token_metadata
from pdserve.rpc.v1 import common_pb2, peer_pb2, peer_pb2_grpc

LEASE = LeaseId(new_incarnation(), 1)
METADATA = token_metadata(TOKEN)


@asynccontextmanager
async def watch(one: Lender) -> AsyncIterator[tuple[Any, Any]]:
    """(stub, open Watch call)."""
    async with open_channel(one.address) as channel:
        stub: Any = peer_pb2_grpc.LeaseStub(channel)
        call = stub.Watch(metadata=METADATA)
        yield stub, call
        call.cancel()


def subscription(lease_id: LeaseId, proof: bytes = b"") -> peer_pb2.WatchRequest:
    return peer_pb2.WatchRequest(lease_id=codec.lease_id_to_wire(lease_id), proof=proof)


async def read(call: Any) -> LeaseView:
    return codec.lease_view_from_wire(await asyncio.wait_for(call.read(), 30))


def test_gone_is_pushed_once_and_ends_the_subscription() -> None:
    """(1) Subscribe: the state at once; (2) advance; (3) release: GONE; (4) nothing is watched any more."""

    async def test() -> None:
        async with lender(FakeFabric()) as one, watch(one) as (stub, call):
            lease_id, ticket = one.grant((1,), 30)
            await call.write(subscription(lease_id, ticket.proof))
            assert await read(call) == LeaseView(lease_id, True, 0)
            one.advance(lease_id, 30, FIRST)
            assert await read(call) == LeaseView(lease_id, True, 30, FIRST)
            wire = codec.lease_id_to_wire(lease_id)
            await stub.Release(peer_pb2.ReleaseRequest(lease_id=wire, proof=b"a guess"), metadata=METADATA)
            assert one.table.num_held == 1, "without its ticket nobody ends it"
            await stub.Release(peer_pb2.ReleaseRequest(lease_id=wire, proof=ticket.proof), metadata=METADATA)
            assert not (await read(call)).held
            assert one.service.num_watched == 0
            one.service.publish(LeaseView(lease_id, False))
            await call.write(subscription(LEASE))  # what comes next on the stream is this answer, no second GONE
            assert (await read(call)).lease_id == LEASE

    asyncio.run(test())


def test_a_stream_that_ends_takes_its_subscriptions_along() -> None:
    async def test() -> None:
        async with lender(FakeFabric()) as one:
            lease_id, ticket = one.grant((1,), 30)
            async with watch(one) as (_, call):
                await call.write(subscription(lease_id, ticket.proof))
                await read(call)
                assert one.service.num_watched == 1
            await asyncio.wait_for(one.until_unwatched(), 30)
            async with watch(one) as (_, call):
                await call.write(subscription(lease_id, ticket.proof))
                await read(call)
                await call.done_writing()
                await asyncio.wait_for(one.until_unwatched(), 30)

    asyncio.run(test())


def test_a_renewal_without_its_proof_is_refused_by_name() -> None:
    async def test() -> None:
        async with lender(FakeFabric()) as one, watch(one) as (stub, _):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Renew(peer_pb2.RenewRequest(lease_ids=[common_pb2.LeaseId()]), metadata=METADATA)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "proofs" in str(raised.value.details())

    asyncio.run(test())


def test_an_expired_lease_is_told_and_returned_once() -> None:
    async def test() -> None:
        async with lender(FakeFabric()) as one, watch(one) as (_, call):
            lease_id, ticket = one.grant((1,), 30)
            await call.write(subscription(lease_id, ticket.proof))
            view = await read(call)
            one.skew_s += 2 * one.table.ttl_s
            while view.held:
                one.expire_due()
                view = await read(call) if one.returned else view
                await asyncio.sleep(0.01)
            assert [lease.lease_id for lease in one.returned] == [lease_id]

    asyncio.run(test())


def test_too_many_renewals_in_one_call_are_refused() -> None:
    async def test() -> None:
        async with lender(FakeFabric()) as one, watch(one) as (stub, _):
            request = peer_pb2.RenewRequest(lease_ids=[common_pb2.LeaseId()] * (MAX_RENEWALS + 1))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Renew(request, metadata=METADATA)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(test())


def test_a_slow_stream_gets_the_newest_view_and_no_backlog() -> None:
    async def test() -> None:
        watchers, watcher = Watchers(), Watcher()
        watchers.subscribe(watcher, LeaseView(LEASE, True, 0))
        for watermark in range(1, 50):
            watchers.publish(LeaseView(LEASE, True, watermark))
        assert await watcher.take() == [LeaseView(LEASE, True, 49)]
        watchers.publish(LeaseView(LEASE, False))
        assert await watcher.take() == [LeaseView(LEASE, False)]
        assert watchers.num_subscriptions == 0

    asyncio.run(test())


def test_a_stream_that_never_reads_is_bounded() -> None:
    """Subscriptions to leases that have ended count as long as their GONE waits to be read."""

    async def test() -> None:
        watchers, watcher = Watchers(), Watcher()

        def subscribe_to_many() -> None:
            for counter in range(MAX_WATCHED + 1):
                watchers.subscribe(watcher, LeaseView(LeaseId(LEASE.incarnation, counter), held=counter % 2 == 0))

        with pytest.raises(TooManyWatched):
            subscribe_to_many()
        assert 0 < watchers.num_subscriptions <= MAX_WATCHED
        watchers.drop(watcher)
        assert watchers.num_subscriptions == 0

    asyncio.run(test())


def test_watching_too_much_ends_the_stream() -> None:
    """The client writes and never reads."""

    async def test() -> None:
        async with lender(FakeFabric()) as one, watch(one) as (_, call):
            one.service._watchers.subscribe = _refuse  # type: ignore[method-assign]
            await call.write(subscription(LEASE))
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asyncio.wait_for(call.read(), 30)
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(test())


def _refuse(watcher: Watcher, view: LeaseView) -> None:
    raise TooManyWatched("no more")


# The versions that two workers compare at the handshake, also if the router has paired them by mistake


def speak(patch: pytest.MonkeyPatch, *, lends: VersionRange, reads: VersionRange) -> None:
    patch.setattr(kvtransfer.lease_service, "PEER_VERSIONS", lends)
    patch.setattr(kvtransfer.lease_client, "PEER_VERSIONS", reads)


@pytest.mark.parametrize(("lends", "reads"), [((0, 1), (0, 1)), ((0, 1), (1, 4)), ((2, 3), (0, 2)), ((0, 0), (0, 1))])
def test_workers_with_a_common_version_lend_and_read(lends, reads, monkeypatch) -> None:
    speak(monkeypatch, lends=VersionRange(*lends), reads=VersionRange(*reads))

    async def test() -> None:
        async with world() as w:
            assert (await w.attach()).watermark == 0

    run(test)


def test_a_lender_refuses_a_reader_that_speaks_none_of_its_versions(monkeypatch) -> None:
    """The reader learns it as a typed error that names both ranges. It connects no transport."""
    speak(monkeypatch, lends=VersionRange(2, 3), reads=VersionRange(0, 1))

    async def test() -> None:
        async with world() as w:
            with pytest.raises(IncompatiblePeer) as caught:
                await w.attach()
            said = "the reader speaks version 0 to 1 of the protocol between workers and the lender speaks 2 to 3: upgrade"
            assert said in caught.value.message
            assert not w.connector.connected

    run(test)


def test_a_reader_refuses_a_lender_that_does_not_look_at_versions(monkeypatch) -> None:
    """An old lender answers everybody. It names no version, which is version 0."""
    speak(monkeypatch, lends=VersionRange(0, 0), reads=VersionRange(1, 2))
    real = VersionRange.common
    monkeypatch.setattr(VersionRange, "common", lambda self, other: 0 if self == (0, 0) else real(self, other))

    async def test() -> None:
        async with world() as w:
            with pytest.raises(
                IncompatiblePeer, match="speaks version 0 of the protocol between workers and this reader speaks 1 to 2"
            ):
                await w.attach()
            assert not w.connector.connected

    run(test)


def test_a_reader_without_versions_is_told_that_it_is_too_old() -> None:
    """Its request has neither field, so it speaks version 0, which has other tickets."""

    async def test() -> None:
        async with lender(FakeFabric()) as one, grpc.aio.insecure_channel(one.address) as channel:
            stub = peer_pb2_grpc.PeerStub(channel)
            with pytest.raises(grpc.aio.AioRpcError, match=r"the reader speaks version 0 .* and the lender speaks 2"):
                await stub.Handshake(peer_pb2.HandshakeRequest(transport="nixl"), metadata=METADATA)

    asyncio.run(asyncio.wait_for(test(), 60))
