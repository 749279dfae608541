"""Failed calls become our errors, and a server refuses what does not carry the cluster's token."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import grpc
import grpc.aio
import pytest
from lender import TOKEN, lender

from kvtransfer.backends.fake import FakeFabric
from pdserve.core import errors
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.rpc.channel import open_channel, token_metadata, translate
from pdserve.rpc.status import REASON_METADATA
from pdserve.rpc.v1 import peer_pb2, peer_pb2_grpc

S = grpc.StatusCode


def failure(status: grpc.StatusCode, reason: str | None = None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*([(REASON_METADATA, reason)] if reason else []))
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), trailing, details="it broke")


@pytest.mark.parametrize("status", list(S))
def test_every_status_has_a_meaning_and_names_the_peer(status: grpc.StatusCode) -> None:
    error = translate(failure(status), "host:1")
    assert isinstance(error, PdserveError)
    assert "host:1" in error.message
    assert "it broke" in error.message


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (S.UNAVAILABLE, errors.ReplicaLost),
        (S.DEADLINE_EXCEEDED, errors.TransferFailed),
        (S.UNAUTHENTICATED, errors.IncompatiblePeer),
        (S.RESOURCE_EXHAUSTED, errors.Overloaded),
        (S.UNKNOWN, errors.InternalBug),
    ],
)
def test_status_without_a_reason(status: grpc.StatusCode, expected: type[PdserveError]) -> None:
    assert type(translate(failure(status), "host:1")) is expected


@pytest.mark.parametrize("code", list(ErrorCode))
def test_the_peers_own_reason_wins(code: ErrorCode) -> None:
    error = translate(failure(S.UNAVAILABLE, code.value), "host:1")
    assert error.code is code


def test_an_unknown_reason_falls_back_to_the_status() -> None:
    assert type(translate(failure(S.UNAVAILABLE, "from the future"), "host:1")) is errors.ReplicaLost


def test_a_port_nobody_listens_on_is_replica_lost() -> None:
    async def test() -> None:
        with socket.socket() as taken:  # bound and not listening: nobody else can take the port meanwhile
            taken.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            async with open_channel(address) as channel:
                stub: Any = peer_pb2_grpc.PeerStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stub.Handshake(peer_pb2.HandshakeRequest(), timeout=30)
        assert type(translate(raised.value, address)) is errors.ReplicaLost

    asyncio.run(test())


@pytest.mark.parametrize("metadata", [(), token_metadata(""), token_metadata("wrong"), token_metadata(TOKEN + " ")])
def test_calls_without_the_token_are_refused(metadata: Any) -> None:
    """Each method, and nothing changes."""

    async def test() -> None:
        async with lender(FakeFabric()) as one, open_channel(one.address) as channel:
            lease_id, _ = one.grant((1,), 3)
            peer: Any = peer_pb2_grpc.PeerStub(channel)
            lease: Any = peer_pb2_grpc.LeaseStub(channel)
            wire = {"incarnation": lease_id.incarnation, "counter": lease_id.counter}
            calls = [
                peer.Handshake(peer_pb2.HandshakeRequest(), metadata=metadata),
                lease.Renew(peer_pb2.RenewRequest(lease_ids=[wire]), metadata=metadata),
                lease.Commit(peer_pb2.CommitRequest(lease_id=wire), metadata=metadata),
                lease.Release(peer_pb2.ReleaseRequest(lease_id=wire), metadata=metadata),
                lease.Watch(metadata=metadata).read(),  # writing while the refusal comes may fail as INTERNAL instead
            ]
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call
                assert raised.value.code() is S.UNAUTHENTICATED
            assert one.table.num_held == 1
            assert one.returned == []

    asyncio.run(test())
