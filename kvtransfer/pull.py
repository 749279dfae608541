"""One handoff as the decode worker does it: wait for the prompt's KV, read it, commit.

    first token known            read finished   commit answered
    |--- read of all blocks ---->|--- Commit --->|   OK: the blocks are the sequence's
    |<----------------- exposed_s ------------->|   anything else: discard them

What was read may be used only after `run` has returned. After it raised, the local blocks may still be written to:
they stay out of use until `stopped` is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.followed_lease import FollowedLease
from kvtransfer.read import Read, Reads
from kvtransfer.ticket import Ticket
from pdserve.config import LeaseConfig
from pdserve.core.errors import InternalBug, TransferFailed
from pdserve.core.ids import ReaderId
from pdserve.core.lease import FirstToken


@dataclass(frozen=True, slots=True)
class Pulled:
    """`blocks` blocks of `kv_bytes` in all are ours.

    transfer_s: read posted to last byte. commit_s: Commit sent to its answer. exposed_s: token 0 known to KV usable.
    """

    first_token: FirstToken
    blocks: int
    kv_bytes: int
    transfer_s: float
    commit_s: float
    exposed_s: float


def transfer_deadline_s(config: LeaseConfig, kv_bytes: int) -> float:
    """Four times what a slow network takes, and never less than the floor."""
    return config.transfer_deadline_floor_s + 4 * kv_bytes / config.transfer_bandwidth_bytes_s


class Pull:
    """Run once. The caller owns `lease` and closes it; `local_blocks` are reserved and hold nothing of use."""

    def __init__(
        self,
        lease: FollowedLease,
        ticket: Ticket,
        local_blocks: Sequence[int],
        reader_id: ReaderId,
        thread: Reads,
        config: LeaseConfig,
    ) -> None:
        if len(local_blocks) != len(ticket.block_ids):
            raise InternalBug(f"{len(ticket.block_ids)} blocks cannot be pulled into {len(local_blocks)}")
        self._lease = lease
        self._ticket = ticket
        self._local_blocks = local_blocks
        self._reader_id = reader_id
        self._thread = thread
        self._config = config
        self._read: Read | None = None

    @property
    def stopped(self) -> asyncio.Future[None] | None:
        """None: no read is in flight and the local blocks are free to use. Else done once that holds."""
        if self._read is None or self._read.is_stopped:
            return None
        return self._read.stopped

    async def run(self, *, wait_s: float) -> Pulled:
        """`wait_s` bounds the wait for token 0, so that renewing cannot hold a lease for ever.

        Raises `LeaseGone`, `TransferFailed`, `ReplicaLost` or `IncompatiblePeer`: discard, and look at `stopped`.
        """
        first_token = await self._wait_first_token(wait_s)
        ready_s = self._now_s()
        transfer_s = await self._transfer()
        read_s = self._now_s()
        blocks = len(self._local_blocks)
        await self._lease.commit(self._reader_id, blocks)
        usable_s = self._now_s()
        return Pulled(first_token, blocks, self._ticket.kv_bytes, transfer_s, usable_s - read_s, usable_s - ready_s)

    async def _wait_first_token(self, wait_s: float) -> FirstToken:
        try:
            async with asyncio.timeout(wait_s):
                return await self._lease.first_token()
        except TimeoutError as exc:
            raise TransferFailed(
                f"lease {self._lease.lease_id}: {self._lease.watermark} of {self._lease.prompt_len} tokens after {wait_s:.1f} s"
            ) from exc

    async def _transfer(self) -> float:
        """Read all blocks. Returns only when the read has resolved, which is what allows Commit."""
        ticket = self._ticket
        self._read = self._thread.read(
            ticket.incarnation,
            ticket.region,
            ticket.block_ids,
            self._local_blocks,
            deadline_s=transfer_deadline_s(self._config, ticket.kv_bytes),
        )
        result = await self._read.result
        assert self._read.is_stopped
        return result.duration_s

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()
