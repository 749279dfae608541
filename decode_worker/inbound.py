"""The blocks of one bind, into which a peer's KV is pulled: from Reserved until a sequence owns them or they are discarded."""

from __future__ import annotations

import logging

from kvtransfer.lease_client import FollowedLease, LeaseClient
from kvtransfer.pull import PrefillStalled, Pull, PullResult
from kvtransfer.thread import BlockSource, PoolSource
from kvtransfer.ticket import Ticket
from pdserve.core.block_pools import BlockTables, count_blocks
from pdserve.core.errors import IncompatiblePeer, KvCorrupt, PdserveError, ReplicaLost, TransferFailed
from pdserve.core.ids import LeaseId, ReaderId
from pdserve.worker.host import Host

log = logging.getLogger(__name__)


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
        host: Host,
        leases: LeaseClient,
        reader_id: ReaderId,
        block_tables: BlockTables,
        *,
        prompt_hash: bytes,
        first_block: int = 0,
        wait_s: float,
    ) -> None:
        """Take the blocks of one bind in each KV group. `prompt_hash` names the prompt that was bound. Blocks before
        `first_block` hold their KV already and are not read. `wait_s` bounds the whole wait for the prompt, so that renewals
        cannot hold a lease for ever.
        """
        self._host = host
        self._leases = leases
        self._reader_id = reader_id
        self._block_tables = block_tables
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
        ticket.check_layout(self._host.kv_spec)
        ticket.check_checksums(self._host.config.lease.kv_checksum)
        sources = [self._source_for(ticket, group) for group in range(len(ticket.block_tables))]
        needed = len(self._block_tables[0])
        if ticket.num_blocks != needed or count_blocks(ticket.block_tables) != count_blocks(self._block_tables):
            raise TransferFailed(f"the ticket is of {ticket.prompt_len} tokens, but the prompt has {needed} blocks")
        self._lease = await self._leases.attach(lease_id, ticket, deadline_s=self._wait_s)
        config = self._host.config.lease
        self._pull = Pull(
            self._lease,
            ticket,
            self._block_tables,
            self._reader_id,
            sources,
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

    def _source_for(self, ticket: Ticket, group: int) -> BlockSource:
        """Return a source that reads straight into our pool if both sides store this KV group alike, else one that converts.

        Raises `IncompatiblePeer` when this worker cannot convert.
        """
        theirs, ours = ticket.kv_spec.groups[group], self._host.kv_spec.groups[group]
        if theirs == ours:
            return PoolSource(self._host.transfer, self._host.regions[group])
        if self._host.staging is None:
            raise IncompatiblePeer(f"the peer's KV is {theirs.dtype}, ours {ours.dtype}; this worker cannot convert")
        return self._host.staging.source_for(ticket, group)

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
