"""The blocks of one bind, into which a peer's KV is pulled: from Reserved until a sequence owns them or they are discarded."""

from __future__ import annotations

import logging
from typing import Protocol

from kvtransfer.lease.client import LeaseClient
from kvtransfer.lease.followed import FollowedLease
from kvtransfer.lease.ticket import Ticket
from kvtransfer.reads.block_read import BlockSource
from kvtransfer.reads.pull import PrefillStalled, Pull, PullResult
from kvtransfer.staging.staging import BlockTransfer, Staging
from pdserve.config import WorkerConfig
from pdserve.core.errors import IncompatiblePeer, KvCorrupt, PdserveError, ReplicaLost, TransferFailed
from pdserve.core.ids import BlockId, LeaseId, ReaderId
from pdserve.core.kv_layout import KvGroup

log = logging.getLogger(__name__)


class PullHost(Protocol):
    """The parts of a worker that a pull uses. A `Host` has all of them."""

    @property
    def layout(self) -> KvGroup:
        """The layout of the worker's pool."""
        ...

    @property
    def config(self) -> WorkerConfig:
        """The settings of the worker."""
        ...

    @property
    def transfer(self) -> BlockTransfer:
        """The transfer thread, which reads straight into the pool."""
        ...

    @property
    def staging(self) -> Staging | None:
        """The staging that converts KV of another dtype. None: this worker cannot convert."""
        ...


def speaks_against_pair(error: PdserveError) -> bool:
    """Tell whether the error that ended a pull is evidence that KV does not pass between the two workers.

    Evidence is a read that failed or passed its own deadline, KV that changed on its way, or a lender that does not answer. No
    evidence is a lease that is gone, since the lender has answered; nor KV that changed in the lender's memory, a prompt that
    was not computed in time, or the deadline of the request itself.
    """
    return isinstance(error, TransferFailed | KvCorrupt | ReplicaLost) and not isinstance(error, PrefillStalled)


class InboundBlocks:
    """The reserved blocks of one bind, and the pull into them. Loop thread only. `abandon` must follow when `pull` has raised
    or was cancelled."""

    def __init__(
        self,
        host: PullHost,
        leases: LeaseClient,
        reader_id: ReaderId,
        block_ids: tuple[BlockId, ...],
        *,
        prompt_hash: bytes,
        first_block: int = 0,
        wait_s: float,
    ) -> None:
        """Take the blocks of one bind. `prompt_hash` names the prompt that was bound. Blocks before `first_block` hold their KV
        already and are not read. `wait_s` bounds the whole wait for the prompt, so that renewals cannot hold a lease for ever.
        """
        self._host = host
        self._leases = leases
        self._reader_id = reader_id
        self._block_ids = block_ids
        self._prompt_hash = prompt_hash
        self._first_block = first_block
        self._wait_s = wait_s
        self._lease: FollowedLease | None = None
        self._pull: Pull | None = None

    @property
    def read_in_flight(self) -> bool:
        """True when the transport may still write into the blocks."""
        return self._pull is not None and self._pull.read_in_flight

    async def pull(self, lease_id: LeaseId, ticket_bytes: bytes) -> PullResult:
        """Follow the lease, read blocks as they become final, and commit. The KV may be used only after this has returned.

        Raises `LeaseGone`, `TransferFailed`, `KvCorrupt`, `KvRotted`, `ReplicaLost`, `DeadlineExceeded`, `IncompatiblePeer`.
        """
        ticket = Ticket.decode(ticket_bytes)
        ticket.check_request(lease_id, self._prompt_hash)
        ticket.check_layout(self._host.layout)
        ticket.check_checksums(self._host.config.lease.kv_checksum)
        source = self._source_for(ticket)
        if len(ticket.block_ids) != len(self._block_ids):
            raise TransferFailed(f"the ticket has {len(ticket.block_ids)} blocks, but the prompt has {len(self._block_ids)}")
        self._lease = await self._leases.attach(lease_id, ticket, deadline_s=self._wait_s)
        config = self._host.config.lease
        self._pull = Pull(
            self._lease,
            ticket,
            self._block_ids,
            self._reader_id,
            source,
            config,
            first_block=self._first_block,
        )
        pulled = await self._pull.run(wait_s=self._wait_s)
        self._lease.close()
        log.info(
            "pulled lease %s: blocks=%d reads=%d kv_bytes=%d exposed_bytes=%d transfer_ms=%.1f commit_ms=%.1f exposed_ms=%.1f",
            lease_id,
            pulled.blocks,
            pulled.reads,
            pulled.kv_bytes,
            pulled.exposed_bytes,
            1e3 * pulled.transfer_s,
            1e3 * pulled.commit_s,
            1e3 * pulled.exposed_s,
        )
        return pulled

    def _source_for(self, ticket: Ticket) -> BlockSource:
        """Return the transfer thread if both sides store KV in the same layout, else a source that converts.

        Raises `IncompatiblePeer` when this worker cannot convert.
        """
        if ticket.layout == self._host.layout:
            return self._host.transfer
        if self._host.staging is None:
            raise IncompatiblePeer(
                f"the peer's KV is {ticket.layout.dtype}, ours {self._host.layout.dtype}; this worker cannot convert"
            )
        return self._host.staging.source_for(ticket)

    async def abandon(self, *, release: bool) -> None:
        """Return once nothing writes into the blocks any more. `release` True also ends the lease, so that its blocks are freed
        early. It must be False for a bind that the router has cancelled, since another worker may read that lease by now."""
        if self._lease is not None:
            self._lease.close()
            if release:
                await self._lease.release()
        stopped = self._pull.stopped if self._pull is not None else None
        if stopped is not None:
            await stopped
