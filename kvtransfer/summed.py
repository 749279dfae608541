"""Reads whose blocks are summed when they have arrived: what a Commit says of them.

    peer's pool --read, transfer thread--> our blocks --sum, converter thread--> result

A chunk is summed while the next one is read, so only the last one's sum is exposed. Summing only reads: blocks are free
to use again, for whoever gave the read up, as soon as the transport has stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol

from kvtransfer.api import RemoteRegion
from kvtransfer.converter import Converter
from kvtransfer.read import Read, Reads
from pdserve.config import LeaseConfig
from pdserve.core.errors import InternalBug, PdserveError, TransferFailed
from pdserve.core.ids import BlockSum, Incarnation
from pdserve.core.kv_layout import ceil_div

log = logging.getLogger(__name__)


class SumBlocks(Protocol):
    """Checksums over all stored bytes of these blocks of one region, in order. Any thread; it blocks."""

    def __call__(self, block_ids: Sequence[int], /) -> tuple[BlockSum, ...]: ...


CHUNK_BLOCKS: Final = 32
"""Blocks of one chunk, which are summed while the next chunk is read: a step's worth of KV by default, 12 MB of SmolLM2-135M
in bf16."""
MAX_CHUNKS: Final = 4
"""The most chunks of one read; a longer read has larger chunks. So two reads of each of 64 sequences stay under the transfer
thread's limit."""


class SummedReads:
    """See `kvtransfer.read.Reads`. Loop-owned, one of a worker. The caller closes `converter`."""

    def __init__(self, reads: Reads, sum_blocks: SumBlocks, converter: Converter) -> None:
        """`reads` are into the region that `sum_blocks` sums."""
        self._reads = reads
        self._sum_blocks = sum_blocks
        self._converter = converter
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        return not self._tasks

    def deadline_s(self, peer: Incarnation, nbytes: int, config: LeaseConfig) -> float:
        return self._reads.deadline_s(peer, nbytes, config)

    def read(
        self,
        peer: Incarnation,
        region: RemoteRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        deadline_s: float,
    ) -> Read:
        """`deadline_s` holds for the read and the sums together. A long one is posted as several, one behind the other."""
        loop = asyncio.get_running_loop()
        read = Read(peer, len(local_blocks) * region.block_bytes, loop)
        parts: list[Read] = []
        size = max(CHUNK_BLOCKS, ceil_div(len(local_blocks), MAX_CHUNKS))
        chunks = [slice(first, first + size) for first in range(0, len(local_blocks), size)]
        for chunk in chunks:
            try:
                parts.append(self._reads.read(peer, region, remote_blocks[chunk], local_blocks[chunk], deadline_s=deadline_s))
            except PdserveError as exc:
                if not parts:
                    raise
                read.fail(exc)  # what was posted goes on until it stops
                break
        late = TransferFailed(f"{len(local_blocks)} blocks from peer {peer:016x} took more than {deadline_s:.1f} s to sum")
        read.timers = [loop.call_later(deadline_s, read.fail, late)]
        task = asyncio.create_task(self._carry(read, parts, [tuple(local_blocks[chunk]) for chunk in chunks]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return read

    async def _carry(self, read: Read, parts: list[Read], chunks: list[tuple[int, ...]]) -> None:
        """`parts`: the reads that were posted, one for each of the first chunks; posting the rest may have failed."""
        began_s = asyncio.get_running_loop().time()
        sums: list[BlockSum] = []
        for part, chunk in zip(parts, chunks, strict=False):
            await asyncio.wait([part.result, read.result], return_when=asyncio.FIRST_COMPLETED)
            if read.result.done():
                break
            if (error := part.result.exception()) is not None:
                assert isinstance(error, PdserveError)
                read.fail(error)
                break
            sums += await self._sum(read, chunk)
        else:
            read.succeed(asyncio.get_running_loop().time() - began_s, tuple(sums))
        await asyncio.gather(*(part.stopped for part in parts))
        read.mark_stopped()

    async def _sum(self, read: Read, chunk: tuple[int, ...]) -> tuple[BlockSum, ...]:
        """Returns no sums when the read has its result already, for example from its own timer: nobody needs them then."""
        summing = asyncio.ensure_future(self._converter.run(partial(self._sum_blocks, chunk)))
        either: list[asyncio.Future[Any]] = [summing, read.result]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if read.result.done():
            summing.cancel()
        elif (error := summing.exception()) is not None:
            log.error("summing KV of peer %016x", read.peer, exc_info=error)
            read.fail(InternalBug(f"summing KV: {error!r}"))
        else:
            return summing.result()
        return ()
