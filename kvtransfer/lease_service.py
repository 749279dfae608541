"""The lender's side of the lease protocol: a prefill worker answers the readers of its blocks. See peer.proto.

It decides nothing: every answer is the `LeaseTable`'s. It runs on the worker's loop, like the table.

A Commit may come before the lender has summed its last blocks, because a step's events go out first. The Commit waits for
these checksums. If checksums differ, the lender first sums its own blocks again, and then answers.

A Watch stream that is slow to read gets the newest view of each lease, never a backlog.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Any, Final

import grpc

from pdserve.core.errors import IncompatiblePeer, PdserveError
from pdserve.core.ids import BlockSum, Incarnation, LeaseId, SeqId
from pdserve.core.kv_layout import MAX_KV_GROUPS
from pdserve.core.lease import CommitAnswer, GroupSums, Lease, LeaseTable, LeaseView
from pdserve.core.worker import PEER_VERSIONS, VersionRange, digests_differ
from pdserve.rpc import codec, status
from pdserve.rpc.channel import require_token
from pdserve.rpc.v1 import peer_pb2, peer_pb2_grpc

MAX_WATCHED: Final = 8192
"""The most subscriptions and pending views of one stream together: many times what a decode worker can bind."""


class TooManyWatched(Exception):
    """A stream asked for more subscriptions than `MAX_WATCHED` allows."""


class Watcher:
    """One Watch stream: its subscriptions, and the views that wait to be sent."""

    def __init__(self) -> None:
        self.subscriptions: set[LeaseId] = set()
        self._pending: dict[LeaseId, LeaseView] = {}
        self._wake = asyncio.Event()
        self._closed = False

    @property
    def load(self) -> int:
        """The number of subscriptions and pending views, which the server keeps for this stream."""
        return len(self.subscriptions) + len(self._pending)

    def push(self, view: LeaseView) -> None:
        """Queue a view; it replaces an older one of the same lease."""
        self._pending[view.lease_id] = view
        self._wake.set()

    def close(self) -> None:
        """End the stream: `take` returns None once the pending views are taken."""
        self._closed = True
        self._wake.set()

    async def take(self) -> list[LeaseView] | None:
        """Wait for a change, and return the newest view of each changed lease. None: the stream is closed."""
        await self._wake.wait()
        if not self._closed:
            self._wake.clear()
        views, self._pending = list(self._pending.values()), {}
        return None if self._closed and not views else views


class Watchers:
    """The owner of all subscriptions. It is used on one loop."""

    def __init__(self) -> None:
        self._by_lease: dict[LeaseId, list[Watcher]] = {}

    @property
    def num_subscriptions(self) -> int:
        """The number of subscriptions of all streams."""
        return sum(len(watchers) for watchers in self._by_lease.values())

    def subscribe(self, watcher: Watcher, view: LeaseView) -> None:
        """Push `view` now, and each view of this lease that is published later. Raises `TooManyWatched`."""
        if watcher.load >= MAX_WATCHED:
            raise TooManyWatched(f"a stream may hold {MAX_WATCHED} subscriptions and pending views")
        if view.held and view.lease_id not in watcher.subscriptions:
            watcher.subscriptions.add(view.lease_id)
            self._by_lease.setdefault(view.lease_id, []).append(watcher)
        watcher.push(view)

    def publish(self, view: LeaseView) -> None:
        """Push a view to all watchers of its lease. GONE also ends their subscriptions to it."""
        watchers = self._by_lease.get(view.lease_id, []) if view.held else self._by_lease.pop(view.lease_id, [])
        for watcher in watchers:
            watcher.push(view)
            if not view.held:
                watcher.subscriptions.discard(view.lease_id)

    def drop(self, watcher: Watcher) -> None:
        """Remove the subscriptions of a stream that has ended."""
        for lease_id in watcher.subscriptions:
            remaining = [other for other in self._by_lease.pop(lease_id, []) if other is not watcher]
            if remaining:
                self._by_lease[lease_id] = remaining
        watcher.subscriptions.clear()


MAX_RENEWALS: Final = 4096
"""The most leases in one Renew. A reader with more leases sends several."""
SUMS_WAIT_S: Final = 1.0
"""A Commit waits so long for the lender's own checksums, which follow the last advance by a millisecond for each 10 MB of its
step, and as long for the rehash, which waits for a running step. It is less than `commit_timeout_s`, after which the reader
asks again."""
_RESULTS: Final = {
    CommitAnswer.OK: peer_pb2.COMMIT_RESULT_OK,
    CommitAnswer.GONE: peer_pb2.COMMIT_RESULT_GONE,
    CommitAnswer.CORRUPT: peer_pb2.COMMIT_RESULT_CORRUPT,
}


def versions_differ(peer: str, theirs: VersionRange, here: str, ours: VersionRange) -> str:
    """Return the message that a peer speaks no common version of the protocol between workers, and what to do."""
    return (
        f"{peer} speaks version {theirs} of the protocol between workers and {here} speaks {ours}: "
        "upgrade the older one of the two"
    )


class PeerService(peer_pb2_grpc.PeerServicer):
    """The service that gives this worker's agent metadata to readers. Reads are one-sided, so this worker need not know the
    reader's agent."""

    def __init__(
        self,
        incarnation: Incarnation,
        agent_metadata: bytes,
        *,
        cluster_token: str,
        transport: str = "nixl",
        model_digest: str = "",
    ) -> None:
        """`transport` is the name of the transport in the settings, which readers compare with their own, as they do with
        `model_digest`. A reader of other weights is refused."""
        self._model_digest = model_digest
        self._response = peer_pb2.HandshakeResponse(
            incarnation=incarnation,
            agent_metadata=agent_metadata,
            transport=transport,
            oldest_peer_version=PEER_VERSIONS.oldest,
            peer_version=PEER_VERSIONS.newest,
            model_digest=model_digest,
        )
        self._cluster_token = cluster_token

    async def Handshake(self, request: peer_pb2.HandshakeRequest, context: Any) -> peer_pb2.HandshakeResponse:
        await require_token(context, self._cluster_token)
        theirs = VersionRange(request.oldest_peer_version, request.peer_version)
        if PEER_VERSIONS.common(theirs) is None:
            await status.abort(context, IncompatiblePeer(versions_differ("the reader", theirs, "the lender", PEER_VERSIONS)))
        if request.model_digest != self._model_digest:
            said = digests_differ("the reader", request.model_digest, "the lender", self._model_digest)
            await status.abort(context, IncompatiblePeer(said))
        return self._response


class LeaseService(peer_pb2_grpc.LeaseServicer):
    """The service through which readers use leases. `clock` is the table's, in seconds.

    `on_change` is called after each call in which leases may have ended: the owner of the blocks then drains `take_returned`.
    `rehash` returns how many blocks of a sequence's lease differ from their checksums; it is called while the lease is held.
    """

    def __init__(
        self,
        table: LeaseTable,
        clock: Callable[[], float],
        on_change: Callable[[], None],
        *,
        cluster_token: str,
        rehash: Callable[[SeqId], Awaitable[int]] | None = None,
    ) -> None:
        self.corrupt_blocks = 0
        """The number of blocks, over all Commits, for which the reader's checksum differed from ours."""
        self._rehash = rehash
        self._sealed: asyncio.Future[None] | None = None
        """A future for the Commits that wait for checksums. It is done when checksums have come or leases have ended."""
        self._table = table
        self._clock = clock
        self._on_change = on_change
        self._cluster_token = cluster_token
        self._watchers = Watchers()

    def publish(self, view: LeaseView) -> None:
        """Push a lease's new state to its watchers. GONE is pushed once and ends the subscriptions."""
        self._watchers.publish(view)

    def seal(self, lease_id: LeaseId, first: int, sums: GroupSums) -> None:
        """Call `LeaseTable.seal`, and wake the Commits that wait for checksums."""
        self._table.seal(lease_id, first, sums, now_s=self._clock())
        self._wake()

    def take_returned(self) -> list[Lease]:
        """Return `LeaseTable.take_returned`, and push GONE to the watchers of these leases."""
        returned = self._table.take_returned()
        if returned:
            self._wake()
        for lease in returned:
            self._watchers.publish(LeaseView(lease.lease_id, held=False))
        return returned

    @property
    def num_watched(self) -> int:
        """The number of subscriptions of all streams; 0 when no lease is held."""
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
            await reading  # raises the error that ended it, if there is one
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
        if len(request.proofs) != len(request.lease_ids):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"proofs: has {len(request.proofs)}, one for each of lease_ids is needed"
            )
        now_s = self._clock()
        asked = zip(request.lease_ids, request.proofs, strict=True)
        views = [self._table.renew(codec.lease_id_from_wire(wire), proof, now_s=now_s) for wire, proof in asked]
        self._on_change()
        return peer_pb2.RenewResponse(statuses=[codec.lease_view_to_wire(view) for view in views])

    async def Commit(self, request: peer_pb2.CommitRequest, context: Any) -> peer_pb2.CommitResponse:
        await require_token(context, self._cluster_token)
        lease_id = codec.lease_id_from_wire(request.lease_id)
        reader = codec.reader_id_from_wire(request.reader_id)
        if len(request.group_sums) > MAX_KV_GROUPS:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"group_sums: has {len(request.group_sums)}, at most {MAX_KV_GROUPS} are allowed",
            )
        sums = [[BlockSum(value) for value in group.sums] for group in request.group_sums]
        await self._wait_for_sums(lease_id)
        lease = self._table.held(lease_id)
        answer = self._table.commit(
            lease_id, reader, request.blocks, request.first, sums, proof=request.proof, now_s=self._clock()
        )
        self._on_change()
        rotted = None
        if answer is CommitAnswer.CORRUPT and lease is not None:
            self.corrupt_blocks += lease.differing(request.first, sums) or 0
            rotted = await self._look_into(lease)
        first = self._table.first_token(lease_id) if answer is CommitAnswer.OK else None
        return peer_pb2.CommitResponse(
            result=_RESULTS[answer], rotted_blocks=rotted, first_token=codec.first_token_to_wire(first)
        )

    async def Release(self, request: peer_pb2.ReleaseRequest, context: Any) -> peer_pb2.ReleaseResponse:
        await require_token(context, self._cluster_token)
        self._table.release(codec.lease_id_from_wire(request.lease_id), request.proof, now_s=self._clock())
        self._on_change()
        return peer_pb2.ReleaseResponse()

    async def _read_subscriptions(self, requests: AsyncIterable[peer_pb2.WatchRequest], watcher: Watcher) -> None:
        async for request in requests:
            lease_id = codec.lease_id_from_wire(request.lease_id)
            view = self._table.look(lease_id, request.proof, now_s=self._clock())
            # A held lease looks GONE to a caller without its ticket. A push of that would reach readers that have the ticket.
            if view.held or self._table.held(lease_id) is None:
                self._watchers.subscribe(watcher, view)
            self._on_change()  # looking expires what is due

    async def _wait_for_sums(self, lease_id: LeaseId) -> None:
        """Wait, at most `SUMS_WAIT_S`, until the lease has all its checksums. The table refuses a Commit without them."""
        end_s = self._clock() + SUMS_WAIT_S
        while self._table.awaits_sums(lease_id, now_s=self._clock()) and (left_s := end_s - self._clock()) > 0:
            if self._sealed is None:
                self._sealed = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._sealed], timeout=left_s)

    def _wake(self) -> None:
        if self._sealed is not None:
            self._sealed.set_result(None)
            self._sealed = None

    async def _look_into(self, lease: Lease) -> int | None:
        """Return how many blocks of the lease have changed in our memory. None: the answer did not come in time."""
        if self._rehash is None:
            return None
        try:
            async with asyncio.timeout(SUMS_WAIT_S):
                return await self._rehash(lease.seq_id)
        except (TimeoutError, PdserveError):
            return None
