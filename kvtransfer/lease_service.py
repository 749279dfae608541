"""The lender's side: what a prefill worker answers to the readers of its blocks. See peer.proto.

Decides nothing: every answer is the `LeaseTable`'s. Runs on the worker's loop, like the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from typing import Any, Final

import grpc

from kvtransfer.watchers import TooManyWatched, Watcher, Watchers
from pdserve.core.ids import Incarnation
from pdserve.core.lease import Lease, LeaseTable, LeaseView
from pdserve.rpc import codec
from pdserve.rpc.channel import require_token
from pdserve.rpc.v1 import peer_pb2, peer_pb2_grpc

MAX_RENEWALS: Final = 4096
"""Leases in one Renew; a reader with more sends several."""


class PeerService(peer_pb2_grpc.PeerServicer):
    """Introduces this worker's transport agent. Reads are one-sided, so the caller's agent need not be known here."""

    def __init__(self, incarnation: Incarnation, agent_metadata: bytes, *, cluster_token: str) -> None:
        self._response = peer_pb2.HandshakeResponse(incarnation=incarnation, agent_metadata=agent_metadata)
        self._cluster_token = cluster_token

    async def Handshake(self, request: peer_pb2.HandshakeRequest, context: Any) -> peer_pb2.HandshakeResponse:
        await require_token(context, self._cluster_token)
        return self._response


class LeaseService(peer_pb2_grpc.LeaseServicer):
    """`clock` is the table's, in seconds. `on_change` is called after any call in which leases may have ended: the
    owner of the blocks then drains `take_returned`."""

    def __init__(
        self, table: LeaseTable, clock: Callable[[], float], on_change: Callable[[], None], *, cluster_token: str
    ) -> None:
        self._table = table
        self._clock = clock
        self._on_change = on_change
        self._cluster_token = cluster_token
        self._watchers = Watchers()

    def publish(self, view: LeaseView) -> None:
        """Push a lease's new state to whoever watches it; GONE is pushed once and ends the subscription."""
        self._watchers.publish(view)

    def take_returned(self) -> list[Lease]:
        """`LeaseTable.take_returned`, after telling their watchers that these leases are gone."""
        returned = self._table.take_returned()
        for lease in returned:
            self._watchers.publish(LeaseView(lease.lease_id, held=False))
        return returned

    @property
    def num_watched(self) -> int:
        """Subscriptions of all streams; 0 when no lease is held."""
        return self._watchers.num_subscriptions

    async def Watch(self, requests: AsyncIterable[peer_pb2.WatchRequest], context: Any) -> None:
        await require_token(context, self._cluster_token)
        watcher = Watcher()
        reading = asyncio.create_task(self._read_subscriptions(requests, watcher))
        reading.add_done_callback(lambda _: watcher.close())
        try:
            while (views := await watcher.take()) is not None:
                for view in views:
                    await context.write(codec.lease_view_to_wire(view))
            await reading  # raises what ended it, if anything did
        except TooManyWatched as exc:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(exc))
        finally:
            self._watchers.drop(watcher)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def Renew(self, request: peer_pb2.RenewRequest, context: Any) -> peer_pb2.RenewResponse:
        await require_token(context, self._cluster_token)
        if len(request.lease_ids) > MAX_RENEWALS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"lease_ids: has {len(request.lease_ids)}, at most {MAX_RENEWALS} are allowed"
            )
        now_s = self._clock()
        views = [self._table.renew(codec.lease_id_from_wire(wire), now_s=now_s) for wire in request.lease_ids]
        self._on_change()
        return peer_pb2.RenewResponse(statuses=[codec.lease_view_to_wire(view) for view in views])

    async def Commit(self, request: peer_pb2.CommitRequest, context: Any) -> peer_pb2.CommitResponse:
        await require_token(context, self._cluster_token)
        lease_id = codec.lease_id_from_wire(request.lease_id)
        reader = codec.reader_id_from_wire(request.reader_id)
        held = self._table.commit(lease_id, reader, request.blocks, now_s=self._clock())
        self._on_change()
        return peer_pb2.CommitResponse(result=peer_pb2.COMMIT_RESULT_OK if held else peer_pb2.COMMIT_RESULT_GONE)

    async def Release(self, request: peer_pb2.ReleaseRequest, context: Any) -> peer_pb2.ReleaseResponse:
        await require_token(context, self._cluster_token)
        self._table.release(codec.lease_id_from_wire(request.lease_id), now_s=self._clock())
        self._on_change()
        return peer_pb2.ReleaseResponse()

    async def _read_subscriptions(self, requests: AsyncIterable[peer_pb2.WatchRequest], watcher: Watcher) -> None:
        async for request in requests:
            view = self._table.look(codec.lease_id_from_wire(request.lease_id), now_s=self._clock())
            self._watchers.subscribe(watcher, view)
            self._on_change()  # looking expires what is due
