"""A lender as a prefill worker runs it: the production services and lease table on a real grpc.aio server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from transfer_testing import FakePeer, new_incarnation

from kvtransfer.api import KvRegion, Region
from kvtransfer.backends.fake import FakeFabric
from kvtransfer.lease_client import FollowedLease
from kvtransfer.lease_service import LeaseService, PeerService
from kvtransfer.routed import pack_metadata
from kvtransfer.ticket import Ticket
from pdserve.core.block_hash import prompt_hash
from pdserve.core.ids import BlockId, Incarnation, LeaseId, SeqId
from pdserve.core.kv_layout import KvGroup, KvSpec, gqa_group
from pdserve.core.lease import FirstToken, Lease, LeaseTable
from pdserve.rpc.channel import server_options
from pdserve.rpc.v1 import peer_pb2_grpc

TOKEN = "the cluster's token"
LAYOUT = gqa_group(num_layers=2, num_kv_heads=3, head_dim=64, block_size=64, dtype="bfloat16")  # blocks of 96 KiB
SECRET = bytes(range(32))
PROMPT_HASH = prompt_hash(b"", "")
FIRST = FirstToken(token_id=42, finish_reason=None)


@dataclass
class Calls:
    """What the server was asked, and what it is to do wrong: a method's name to how many of its calls fail."""

    count: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    drop_replies: dict[str, int] = field(default_factory=dict)  # handled, then answered UNAVAILABLE
    delay_s: dict[str, float] = field(default_factory=dict)  # before each is handled


class Chaos(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Counts calls and fails them as told."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        name = details.method.rpartition("/")[2]
        self.calls.count[name] = self.calls.count.get(name, 0) + 1
        handler = await continuation(details)
        await asyncio.sleep(self.calls.delay_s.get(name, 0.0))
        if take(self.calls.failures, name):
            return _failing(handler, before=True)
        if take(self.calls.drop_replies, name):
            return _failing(handler, before=False)
        return handler


def take(budget: dict[str, int], name: str) -> bool:
    left = budget.get(name, 0)
    budget[name] = max(left - 1, 0)
    return left > 0


def _failing(handler: Any, *, before: bool) -> Any:
    async def behaviour(request: Any, context: Any) -> Any:
        if not before:
            await handler.unary_unary(request, context)
        await context.abort(grpc.StatusCode.UNAVAILABLE, "chaos")

    make = grpc.stream_stream_rpc_method_handler if handler.stream_stream else grpc.unary_unary_rpc_method_handler
    return make(behaviour, handler.request_deserializer, handler.response_serializer)  # type: ignore[operator]


def ticket_of(
    lease_id: LeaseId,
    region: Region,
    block_ids: tuple[BlockId, ...],
    prompt_len: int,
    *,
    address: str = "127.0.0.1:1",
    layout: KvGroup = LAYOUT,
    checksums: bool = False,
) -> Ticket:
    """As a prefill worker seals it."""
    ticket = Ticket(
        incarnation=lease_id.incarnation,
        lease_counter=lease_id.counter,
        peer_address=address,
        kv_spec=KvSpec((layout,)),
        regions=(KvRegion.of(layout, region),),
        block_tables=(block_ids,),
        prompt_len=prompt_len,
        prompt_hash=PROMPT_HASH,
        checksums=checksums,
    )
    return ticket.with_mac(SECRET)


class Lender:
    """One incarnation of a prefill worker, without an engine."""

    def __init__(self, peer: FakePeer, *, ttl_s: float) -> None:
        self.peer = peer
        self.calls = Calls()
        self.table = LeaseTable(peer.incarnation, ttl_s=ttl_s)
        self.returned: list[Lease] = []
        self.checksums = False
        self.service = LeaseService(self.table, self.now_s, self._on_change, cluster_token=TOKEN, rehash=self._rehash)
        self.address = ""
        self.skew_s = 0.0  # added to the clock: lets a test pass time
        self._server: Any = None

    def now_s(self) -> float:
        return asyncio.get_running_loop().time() + self.skew_s

    async def serve(self, port: int = 0) -> None:
        self._server = grpc.aio.server(options=server_options(), interceptors=[Chaos(self.calls)])
        peer_service = PeerService(self.peer.incarnation, pack_metadata({0: self.peer.metadata}), cluster_token=TOKEN)
        peer_pb2_grpc.add_PeerServicer_to_server(peer_service, self._server)
        peer_pb2_grpc.add_LeaseServicer_to_server(self.service, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        await self._server.start()

    async def stop(self) -> None:
        """As if killed: open calls break off."""
        await self._server.stop(None)

    async def until_unwatched(self) -> None:
        while self.service.num_watched:  # noqa: ASYNC110 - the server sees the end of a stream when it sees it
            await asyncio.sleep(0.005)

    def grant(self, blocks: tuple[int, ...], prompt_len: int) -> tuple[LeaseId, Ticket]:
        block_ids = tuple(BlockId(block) for block in blocks)
        sums = ((),) if self.checksums else None
        lease_id = self.table.grant(SeqId(1), (block_ids,), prompt_len, sums=sums, now_s=self.now_s())
        ticket = ticket_of(lease_id, self.peer.region, block_ids, prompt_len, address=self.address, checksums=self.checksums)
        self.table.expect(lease_id, ticket.proof)
        return lease_id, Ticket.decode(ticket.encode())

    def seal(self, lease_id: LeaseId) -> None:
        """Sum all its blocks, as an engine does once they are final."""
        lease = self.table.held(lease_id)
        assert lease is not None
        self.service.seal(lease_id, 0, [self.peer.pool.sums(lease.block_tables[0])])

    async def _rehash(self, _: SeqId) -> int:
        """Of the one lease that is held."""
        (lease,) = self.table._held.values()
        assert lease.sums is not None
        return sum(now != was for now, was in zip(self.peer.pool.sums(lease.block_tables[0]), lease.sums[0], strict=True))

    def advance(self, lease_id: LeaseId, watermark: int, first: FirstToken | None = None, *, push: bool = True) -> None:
        view = self.table.advance(lease_id, watermark, first, now_s=self.now_s())
        if push:
            self.service.publish(view)

    def expire_due(self) -> None:
        self.table.expire_due(now_s=self.now_s())
        self._on_change()

    def _on_change(self) -> None:
        self.returned += self.service.take_returned()
        self.table.check_invariants()


@asynccontextmanager
async def lender(fabric: FakeFabric, *, ttl_s: float = 30.0, incarnation: Incarnation | None = None) -> AsyncIterator[Lender]:
    """Serves until the block ends; then no subscription may be left."""
    one = Lender(FakePeer(fabric, incarnation=incarnation or new_incarnation()), ttl_s=ttl_s)
    await one.serve()
    try:
        yield one
    finally:
        await one.stop()
    await asyncio.wait_for(one.until_unwatched(), 30)


async def wait_watermark(lease: FollowedLease, tokens: int) -> int:
    """As its reader waits. Raises the lease's error."""
    while lease.watermark < tokens and lease.error is None:
        await asyncio.wait([lease.changed])
    if lease.error is not None:
        raise lease.error
    return lease.watermark


async def first_token(lease: FollowedLease) -> FirstToken:
    await wait_watermark(lease, lease.prompt_len)
    assert lease.first_token is not None
    return lease.first_token
