"""The handoff between two foreign engines: the lease of ours wraps the ticket of theirs.

A foreign engine believes every ticket: one that was used, that has expired or that is of another prompt gives wrong tokens and
no error. So the ticket stays here until the lender has said OK to a commit for this prompt, once, while its lease was held.
Only then the engine gets it, and fetches the KV by its own means."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from kvtransfer.lease_client import LeaseClient
from kvtransfer.pull import PullResult
from kvtransfer.ticket import EngineTicket
from pdserve.core.errors import PdserveError, TransferFailed
from pdserve.core.ids import LeaseId, ReaderId
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
        self._ticket: tuple[LeaseId, EngineTicket] | None = None
        self._work: asyncio.Task[PullResult] | None = None

    async def pull(self, lease_id: LeaseId, ticket_bytes: bytes) -> PullResult:
        """Commit. The KV may be used only after this has returned.

        Raises `LeaseGone`, `TransferFailed`, `ReplicaLost`, `DeadlineExceeded`, `IncompatiblePeer`. A cancellation does not
        stop the work: `abandon` waits for its end."""
        ticket = EngineTicket.decode(ticket_bytes)
        ticket.check_request(lease_id, self._prompt_hash)
        if ticket.num_blocks != self._blocks:
            raise TransferFailed(f"the ticket is of {ticket.num_blocks} blocks, but the prompt has {self._blocks}")
        self._ticket = lease_id, ticket
        self._work = asyncio.create_task(self._commit(lease_id, ticket), name=f"handoff of lease {lease_id}")
        return await asyncio.shield(self._work)

    async def _commit(self, lease_id: LeaseId, ticket: EngineTicket) -> PullResult:
        """Commit at once. The lease needs no follower: a foreign engine lends a prompt when the whole is computed."""
        loop = asyncio.get_running_loop()
        began_s, commit = loop.time(), SendCommit(blocks=ticket.num_blocks, first=0, sums=())
        first_token = await self._leases.commit(lease_id, ticket, self._reader_id, commit, deadline_s=self._wait_s)
        self._kv = EngineKv(ticket.num_blocks, ticket.params)
        took_s = loop.time() - began_s
        kv_bytes = ticket.num_blocks * self._host.kv_spec.block_bytes
        return PullResult(first_token, ticket.num_blocks, kv_bytes, 0, 0.0, took_s, took_s, 0)

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
        if self._ticket is not None and release and kv is None:
            await self._leases.release(*self._ticket)
