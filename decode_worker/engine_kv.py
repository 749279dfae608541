"""The handoff between two foreign engines: the lease of ours wraps the ticket of theirs.

A foreign engine believes every ticket: one that was used, that has expired or that is of another prompt gives wrong tokens and
no error. So the ticket stays here until the lender has said OK to a commit for this prompt, once, while its lease was held.
Only then the engine gets it, and fetches the KV by its own means."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvtransfer.lease_client import FollowedLease, LeaseClient
from kvtransfer.pull import PrefillStalled, PullResult
from kvtransfer.ticket import EngineTicket
from pdserve.core.errors import PdserveError, TransferFailed
from pdserve.core.ids import LeaseId, ReaderId
from pdserve.core.lease import FirstToken
from pdserve.core.reader import SendCommit
from pdserve.worker.host import Host
from pdserve.worker.messages import DiscardKv, EngineKv

log = logging.getLogger(__name__)

ABANDON_S: Final = 5.0
"""A handoff whose request has ended may go on for so long. Its commit lets the lender's engine free the KV early, which
otherwise stays for the engine's own time (30 s in vLLM)."""


class InboundEngineKv:
    """The KV of one bind, which the engines hand over by themselves. Loop thread only. `abandon` must follow when `pull` has
    raised or was cancelled."""

    read_in_flight = False
    """No read of this worker writes anywhere: the engine has blocks of its own."""

    def __init__(
        self,
        host: Host,
        leases: LeaseClient,
        reader_id: ReaderId,
        *,
        prompt_ids: tuple[int, ...],
        prompt_hash: bytes,
        blocks: int,
        wait_s: float,
    ) -> None:
        """`prompt_hash` names the prompt that was bound, which has `blocks` blocks. `wait_s` bounds the whole wait for it."""
        self._host = host
        self._leases = leases
        self._reader_id = reader_id
        self._prompt_ids = prompt_ids
        self._prompt_hash = prompt_hash
        self._blocks = blocks
        self._wait_s = wait_s
        self._kv: EngineKv | None = None
        self._lease: FollowedLease | None = None
        self._work: asyncio.Task[PullResult] | None = None

    async def pull(self, lease_id: LeaseId, ticket_bytes: bytes) -> PullResult:
        """Wait for the prompt, and commit. The KV may be used only after this has returned.

        Raises `LeaseGone`, `TransferFailed`, `ReplicaLost`, `DeadlineExceeded`, `IncompatiblePeer`. A cancellation does not
        stop the work: `abandon` waits for its end."""
        ticket = EngineTicket.decode(ticket_bytes)
        ticket.check_request(lease_id, self._prompt_hash)
        if ticket.num_blocks != self._blocks:
            raise TransferFailed(f"the ticket is of {ticket.num_blocks} blocks, but the prompt has {self._blocks}")
        self._work = asyncio.create_task(self._commit(lease_id, ticket), name=f"handoff of lease {lease_id}")
        return await asyncio.shield(self._work)

    async def _commit(self, lease_id: LeaseId, ticket: EngineTicket) -> PullResult:
        loop = asyncio.get_running_loop()
        self._lease = lease = await self._leases.attach(lease_id, ticket, deadline_s=self._wait_s)
        first_token = await self._first_token(lease)
        known_s = loop.time()
        await lease.commit(self._reader_id, SendCommit(blocks=ticket.num_blocks, first=0, sums=()))
        lease.close()
        self._kv = EngineKv(ticket.num_blocks, ticket.params)
        took_s = loop.time() - known_s
        kv_bytes = ticket.num_blocks * self._host.kv_spec.block_bytes
        return PullResult(first_token, ticket.num_blocks, kv_bytes, 0, 0.0, took_s, took_s, 0)

    async def _first_token(self, lease: FollowedLease) -> FirstToken:
        """Wait until the lender has the whole prompt, and return token 0. Raises the lease's error, and `PrefillStalled`."""
        limit_s = min(self._wait_s, self._host.config.lease.stalled_s)
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    changed = lease.changed
                    if lease.error is not None:
                        raise lease.error
                    if lease.first_token is not None:
                        return lease.first_token
                    await asyncio.shield(changed)
        except TimeoutError:
            raise PrefillStalled(f"lease {lease.lease_id}: the prompt was not computed within {limit_s:.1f} s") from None

    def take_kv(self) -> EngineKv | None:
        """Return the ticket of the engines after `pull` has returned, once. The engine must use or discard it."""
        kv, self._kv = self._kv, None
        return kv

    async def abandon(self, *, release: bool) -> None:
        """Return once nothing is left of the handoff. A commit that is under way may end, and its KV is then discarded, so that
        the lender's engine frees it. `release` True ends a lease that was not committed."""
        if self._work is not None and not self._work.done():
            await asyncio.wait([self._work], timeout=ABANDON_S)
            self._work.cancel()
        if self._work is not None:
            (outcome,) = await asyncio.gather(self._work, return_exceptions=True)
            if isinstance(outcome, Exception) and not isinstance(outcome, PdserveError):
                log.error("an abandoned handoff failed", exc_info=outcome)
        kv = self.take_kv()
        if kv is not None and kv.params:
            self._host.submit(DiscardKv(self._prompt_ids, kv))
        if self._lease is not None:
            self._lease.close()
            if release and kv is None:
                await self._lease.release()
