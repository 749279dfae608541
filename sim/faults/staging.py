"""The production staging over blocks of tags. The converter runs on virtual time, and staging blocks keep their old content.

A conversion happens some time after it was asked for. So a staging block, or a block of the pool, that is used again too
early leads to wrong tags.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from kvtransfer.api import KvRegion
from kvtransfer.staging import Staging
from pdserve.core.ids import BlockSum
from pdserve.core.kv_layout import KvGroup, KvSpec
from sim.faults.engine import SimKv, SimMemory
from sim.faults.oracle import BLOCK_SIZE
from sim.faults.transfer import SimTransfer, region_of
from sim.world.process import Process

T = TypeVar("T")

NUM_BLOCKS: Final = 4  # few, so that a block is used again as soon as it is given back
CHUNK_BLOCKS: Final = 2
CONVERT_S: Final = 0.002
"""The conversion of a chunk takes at most this time, which is once or twice the time of its read."""
_ADDRESS: Final = 1 << 40


class SimStaged:
    """The simulated staging blocks of one layout; see `kvtransfer.staging.StagingBlocks`."""

    def __init__(self, region: KvRegion, pool: SimMemory, staged: SimMemory) -> None:
        self.region = region
        """The region of the staging blocks."""
        self._pool = pool
        self._staged = staged

    def sums(self, staged: Sequence[int], /) -> tuple[BlockSum, ...]:
        """Return the checksum of each staging block."""
        return self._staged.sums(staged)

    def convert(self, staged: Sequence[int], local: Sequence[int], tokens: int) -> None:
        """Copy the first `tokens` tokens of the staging blocks to blocks of the pool. The rest of the last block is 0."""
        for i, (source, target) in enumerate(zip(staged, local, strict=True)):
            left = min(BLOCK_SIZE, tokens - i * BLOCK_SIZE)
            cells = [[*tags[:left], *(0,) * (BLOCK_SIZE - left), place] for *tags, place in self._staged.blocks[source]]
            self._pool.copy_in(target, range(len(cells)), cells)


class SimConverter:
    """The simulated converter thread; see `kvtransfer.staging.Converter`."""

    def __init__(self, process: Process, rng: random.Random) -> None:
        self._process = process
        self._rng = rng

    async def run(self, work: Callable[[], T]) -> T:
        """Do the work on the transfer thread after a random delay, and return its result."""
        done: asyncio.Future[T] = self._process.loop.create_future()
        self._process.transfer_loop.call_later(self._rng.random() * CONVERT_S, self._run, work, done)
        return await done

    def close(self) -> None:
        """Do nothing: there is no thread."""

    def _run(self, work: Callable[[], T], done: asyncio.Future[T]) -> None:
        result = work()
        self._process.loop.call_soon_threadsafe(lambda: None if done.done() else done.set_result(result))


def make_staging(
    process: Process,
    transfer: SimTransfer,
    spec: KvSpec,
    kv: SimKv,
    converter: SimConverter,
    rng: random.Random,
    *,
    poison: bool,
) -> Staging:
    """Make the production staging over simulated blocks, which `transfer` can read into."""

    def make_blocks(layout: KvGroup, num_blocks: int) -> SimStaged:
        group = next(g for g, ours in enumerate(spec.groups) if ours.holds_the_same_as(layout))
        pool = kv.groups[group]
        memory = SimMemory(layout, pool.shares, num_blocks, rng, poison=poison)
        region = region_of(memory, _ADDRESS << group)
        transfer.add(region, memory)
        return SimStaged(region, pool, memory)

    return Staging(transfer, make_blocks, num_blocks=NUM_BLOCKS, chunk_blocks=CHUNK_BLOCKS, converter=converter)
