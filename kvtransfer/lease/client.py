"""The reader's side of the lease protocol. It keeps one link to each incarnation of a lender that is in use."""

from __future__ import annotations

import asyncio
import functools
from typing import Final, Protocol

from kvtransfer.lease.followed import FollowedLease
from kvtransfer.lease.peer_link import PeerLink
from kvtransfer.lease.ticket import Ticket, WrongTicket
from pdserve.config import LeaseConfig
from pdserve.core.errors import DeadlineExceeded, ReplicaLost
from pdserve.core.ids import Incarnation, LeaseId

IDLE_CLOSE_S: Final = 180.0
"""A link that follows no lease for so long is closed. Opening it again costs a handshake of a few milliseconds."""


class Connector(Protocol):
    """The part of a `TransferThread` that connects to peers."""

    async def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        """Make a peer's pool readable. See `TransferThread.connect`."""

    def disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer. See `TransferThread.disconnect`."""


class LenderLink(Protocol):
    """The link to one incarnation of one lender. `PeerLink` is the one over gRPC; all links fail with the same errors."""

    incarnation: Incarnation
    address: str

    @property
    def num_followed(self) -> int:
        """The number of followers of all leases."""

    async def handshake(self) -> bytes:
        """Return the lender's agent metadata."""

    async def follow(self, lease_id: LeaseId, prompt_len: int, proof: bytes) -> FollowedLease:
        """Follow a lease and renew it until it is closed."""

    async def close(self) -> None:
        """Release the link. Followed leases fail."""


class MakeLink(Protocol):
    """A function that makes a link to one incarnation of a lender."""

    def __call__(self, incarnation: Incarnation, address: str, config: LeaseConfig, *, cluster_token: str) -> LenderLink: ...


class _Entry:
    """A link with its one handshake, the number of attaches under way, and the timer that closes it when it is idle."""

    def __init__(self, link: LenderLink, handshake: asyncio.Task[bytes]) -> None:
        self.link = link
        self.handshake = handshake
        self.num_attaching = 0
        self.idle_timer: asyncio.TimerHandle | None = None

    @property
    def in_use(self) -> bool:
        return self.num_attaching > 0 or self.link.num_followed > 0


class LeaseClient:
    """All links of one worker that reads. The loop owns it."""

    def __init__(
        self,
        connector: Connector,
        config: LeaseConfig,
        *,
        cluster_token: str,
        idle_close_s: float = IDLE_CLOSE_S,
        make_link: MakeLink = PeerLink,
    ) -> None:
        self._connector = connector
        self._config = config
        self._cluster_token = cluster_token
        self._idle_close_s = idle_close_s
        self._make_link = make_link
        self._entries: dict[Incarnation, _Entry] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def num_peers(self) -> int:
        """The number of open links."""
        return len(self._entries)

    @property
    def num_followed(self) -> int:
        """The number of followers of all leases, over all links."""
        return sum(entry.link.num_followed for entry in self._entries.values())

    async def attach(self, lease_id: LeaseId, ticket: Ticket, *, deadline_s: float) -> FollowedLease:
        """Follow a lease, and connect to its lender's pool, so that it can be read. The caller closes the returned lease.

        Raises `LeaseGone` when the lender was replaced, `ReplicaLost` when it cannot be reached, `TransferFailed` when the
        transport cannot connect, `IncompatiblePeer`, and `DeadlineExceeded` when the request's `deadline_s` passes first.
        """
        if self._closed:
            raise ReplicaLost("the lease client is closed")
        if lease_id != ticket.lease_id:
            raise WrongTicket(f"the ticket is of lease {ticket.lease_id}, not of {lease_id}")
        entry = self._entry(ticket)
        entry.num_attaching += 1
        try:
            async with asyncio.timeout(deadline_s):
                metadata = await self._handshake(entry)
                await self._connector.connect(ticket.incarnation, metadata)
                return await entry.link.follow(lease_id, ticket.prompt_len, ticket.proof)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"{ticket.peer_address} was not ready to be read within {deadline_s:.1f} s") from exc
        finally:
            entry.num_attaching -= 1
            self._arm_idle_timer(entry)

    async def close(self) -> None:
        """Release every task, stream and channel. Followed leases fail with `ReplicaLost`. Idempotent."""
        self._closed = True
        for entry in list(self._entries.values()):
            self._drop(entry)
        await asyncio.gather(*self._closing)

    def _entry(self, ticket: Ticket) -> _Entry:
        entry = self._entries.get(ticket.incarnation)
        if entry is None:
            link = self._make_link(ticket.incarnation, ticket.peer_address, self._config, cluster_token=self._cluster_token)
            handshake = asyncio.create_task(link.handshake())
            entry = self._entries[ticket.incarnation] = _Entry(link, handshake)
            handshake.add_done_callback(functools.partial(self._on_handshake_done, entry))
        return entry

    def _on_handshake_done(self, entry: _Entry, handshake: asyncio.Task[bytes]) -> None:
        """Forget the link of a failed handshake, so that the next attach makes a new one."""
        if handshake.cancelled() or handshake.exception() is not None:
            self._drop(entry)

    async def _handshake(self, entry: _Entry) -> bytes:
        """Return the answer to the link's one handshake, which concurrent attaches share."""
        try:
            return await asyncio.shield(entry.handshake)
        except asyncio.CancelledError:
            if entry.handshake.cancelled():  # `_drop` cancelled it, not the attach that waits here
                raise ReplicaLost(f"the link to {entry.link.address} is closed") from None
            raise

    def _arm_idle_timer(self, entry: _Entry) -> None:
        if entry.idle_timer is None and self._entries.get(entry.link.incarnation) is entry:
            loop = asyncio.get_running_loop()
            entry.idle_timer = loop.call_later(self._idle_close_s, self._on_idle_timer, entry)

    def _on_idle_timer(self, entry: _Entry) -> None:
        entry.idle_timer = None
        if entry.in_use:
            self._arm_idle_timer(entry)
        else:
            self._drop(entry)

    def _drop(self, entry: _Entry) -> None:
        """Forget a link now, and close it in the background."""
        if self._entries.get(entry.link.incarnation) is not entry:
            return
        del self._entries[entry.link.incarnation]
        if entry.idle_timer is not None:
            entry.idle_timer.cancel()
        entry.handshake.cancel()
        self._connector.disconnect(entry.link.incarnation)
        task = asyncio.create_task(entry.link.close(), name=f"close {entry.link.address}")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
