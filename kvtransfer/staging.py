"""Reads from a pool that stores KV in another dtype: they write staging blocks, which are converted into our pool.

    peer's pool --read, transfer thread--> staging blocks --convert, converter thread--> this bind's blocks of our pool
                                          |<------------------ held by one chunk ----------------->|

A read is cut into chunks. Each chunk waits in line until it gets all its staging blocks at once; it is converted while the
next chunk is read. The pull sees one ordinary read: `result` is done once every block is converted, `stopped` once neither
the transport nor the converter can still write into its blocks.

These rules say who may write which blocks. The transport writes staging blocks from the post until its own `stopped`, so a
chunk keeps them that long, even if its request has ended. The converter writes fresh blocks of an `INBOUND` holder, as a
direct read does: until Commit is answered, or the quarantine has ended, the engine does not read, write, share or free them.
The role ends the quarantine only after `stopped`.

Arithmetic for SmolLM2-135M, bf16 to int8, 128 blocks (2,048 tokens): a read of 45 MiB takes 8 ms within one host, and the
conversion takes 20 ms of one core. All but the last chunk's share passes while prefill still computes.

The converter thread sums and converts, so that neither the loop, the transfer thread nor the engine thread waits for that work.

Reads that need staging blocks wait in one line. A chunk gets all its blocks at once and never waits for more, so there is no
circle of waits. One peer never holds more than half of the blocks: a lender that stands still keeps the blocks that its reads
may still write, and the other peers must go on. A peer that is at its limit is passed over in the line.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from kvtransfer.api import AnyRegion
from kvtransfer.thread import BlockRead, BlockSource, TransferThread
from kvtransfer.ticket import Ticket
from pdserve.config import LeaseConfig
from pdserve.core.errors import InternalBug, PdserveError, TransferFailed
from pdserve.core.ids import BlockSum, Incarnation
from pdserve.core.kv_layout import KvGroup

Slots = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Waiter:
    peer: Incarnation
    count: int
    granted: asyncio.Future[Slots]


class SlotPool:
    """A pool of the staging blocks 0 to `num_blocks` - 1. free + held == num_blocks."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._held: dict[Incarnation, int] = {}
        self._line: deque[_Waiter] = deque()

    @property
    def max_per_peer(self) -> int:
        """The most blocks that one peer may hold."""
        return self.num_blocks // 2

    @property
    def num_held(self) -> int:
        """The number of blocks that are taken."""
        return self.num_blocks - len(self._free)

    @property
    def num_waiting(self) -> int:
        """The number of waiters in the line."""
        return len(self._line)

    def take(self, peer: Incarnation, count: int) -> asyncio.Future[Slots]:
        """Wait in line for `count` blocks. The future is done when all are granted. `leave` or `give_back` must follow."""
        assert 0 < count <= self.max_per_peer
        waiter = _Waiter(peer, count, asyncio.get_running_loop().create_future())
        self._line.append(waiter)
        self._serve()
        return waiter.granted

    def leave(self, peer: Incarnation, granted: asyncio.Future[Slots]) -> None:
        """Leave the line, and give back the blocks if they were granted meanwhile."""
        if granted.done():
            self.give_back(peer, granted.result())
            return
        self._line = deque(waiter for waiter in self._line if waiter.granted is not granted)
        self._serve()  # it may have been first, and too large for what is free

    def give_back(self, peer: Incarnation, slots: Slots) -> None:
        """Return blocks that no read and no conversion uses any more."""
        assert not set(slots) & set(self._free), "given back twice"
        self._free.extend(slots)
        self._held[peer] -= len(slots)
        if self._held[peer] == 0:
            del self._held[peer]
        self._serve()

    def _serve(self) -> None:
        """Grant blocks in order. Skip waiters whose peer is at its limit; stop at the first one with too few free blocks."""
        for waiter in list(self._line):
            if self._held.get(waiter.peer, 0) + waiter.count > self.max_per_peer:
                continue
            if waiter.count > len(self._free):
                return
            self._line.remove(waiter)
            self._held[waiter.peer] = self._held.get(waiter.peer, 0) + waiter.count
            waiter.granted.set_result(tuple(self._free.pop() for _ in range(waiter.count)))


T = TypeVar("T")


class Converter(Protocol):
    """An executor that runs one piece of work after the other, in order. A simulation has one without a thread."""

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work`, wait for its end, and return its result. Raises what `work` raises."""
        ...

    def close(self) -> None:
        """Drop the work that has not begun. Work that has begun goes on. Idempotent."""
        ...


class ConverterThread:
    """A converter with a thread of its own, which starts with the first work."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="pdserve-convert")

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the thread."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """Drop the work that has not begun, and do not wait for the rest."""
        self._executor.shutdown(wait=False, cancel_futures=True)


log = logging.getLogger(__name__)

STAGING_BLOCKS: Final = 64
"""The number of staging blocks for each foreign layout, made when its first ticket comes. They take 23 MiB for SmolLM2-135M in
bf16, and 128 MiB for Llama-3-8B. Two peers can have two chunks each under way. The number is chosen, not tuned."""
CHUNK_BLOCKS: Final = 16
"""The number of blocks of a chunk. One chunk is read while another is converted; 16 blocks of 360 KiB take about 1 ms for
either. The number is chosen, not tuned."""
assert 2 * CHUNK_BLOCKS <= STAGING_BLOCKS // 2
STUCK_AFTER_S: Final = 120.0
"""The process must end when the conversion of one chunk, which takes milliseconds, takes so long. The same holds for a read
that does not stop."""


class StagingBlocks(Protocol):
    """Blocks of a peer's layout in our memory, which stays where it is for the life of the process. The worker's `StagedKv` is
    made of tensors, which this package does not know."""

    @property
    def region(self) -> AnyRegion:
        """The region of the staging blocks."""

    def sums(self, staged: Sequence[int], /) -> tuple[BlockSum, ...]:
        """Return checksums of these staging blocks, which hold the KV as the peer stores it. Runs in the converter thread."""
        ...

    def convert(self, staged: Sequence[int], local: Sequence[int], tokens: int) -> None:
        """Convert staging block staged[i] into block local[i] of our pool. Runs in the converter thread and blocks.

        The blocks hold `tokens` tokens in this order; all are full except the last.
        """
        ...


@dataclass(slots=True)
class _Lane:
    """The staging blocks for all peers that store a KV group in one layout."""

    blocks: StagingBlocks
    slots: SlotPool
    waiting_bytes: int = 0
    """The bytes of reads that were asked for and are not posted yet."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One chunk of a read. Its blocks hold `tokens` tokens. `sums` gets the checksums of its staging blocks if they are on."""

    remote: tuple[int, ...]
    local: tuple[int, ...]
    tokens: int
    sums: list[BlockSum] = field(default_factory=list)


class Staging:
    """All staging of one worker. The loop owns it, like the `TransferThread` that reads for it; close it after that thread."""

    def __init__(
        self,
        transfer: TransferThread,
        make_blocks: Callable[[KvGroup, int], StagingBlocks],
        *,
        num_blocks: int = STAGING_BLOCKS,
        chunk_blocks: int = CHUNK_BLOCKS,
        stuck_after_s: float = STUCK_AFTER_S,
        converter: Converter | None = None,
    ) -> None:
        """`make_blocks(layout, count)` makes `count` staging blocks of that layout. It is called on the loop, once for each
        layout. `converter` None stands for a thread of its own."""
        self.chunk_blocks = chunk_blocks
        self._transfer = transfer
        self._make_blocks = make_blocks
        self._num_blocks = num_blocks
        self._stuck_after_s = stuck_after_s
        self._lanes: dict[KvGroup, _Lane] = {}
        self._converter = converter or ConverterThread()
        self._converting = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_held(self) -> int:
        """The number of staging blocks that a read or a conversion uses."""
        return sum(lane.slots.num_held for lane in self._lanes.values())

    @property
    def idle(self) -> bool:
        """True when no read is under way and every staging block is free."""
        return all(task.done() for task in self._tasks) and self.num_held == 0

    def source_for(self, ticket: Ticket, group: int) -> BlockSource:
        """Return the source for the ticket's blocks of one KV group, whose checked layout differs from ours."""
        layout = ticket.kv_spec.groups[group]
        lane = self._lanes.get(layout)
        if lane is None:
            log.info("KV of %s is converted: %d staging blocks", layout, self._num_blocks)
            lane = self._lanes[layout] = _Lane(self._make_blocks(layout, self._num_blocks), SlotPool(self._num_blocks))
        return _StagedSource(self, lane, ticket, ticket.block_tables[group])

    def close(self) -> None:
        """Cancel the tasks and close the converter. Reads that still run, because the transport did not end, never count as
        stopped, and their memory stays."""
        if self._lanes:
            log.log(logging.INFO if self.idle else logging.ERROR, "staging ends with %d blocks in use", self.num_held)
        for task in self._tasks:
            task.cancel()
        self._converter.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task that `close` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def move(
        self, read: BlockRead, lane: _Lane, chunk: _Chunk, region: AnyRegion, slots: Slots, due_s: float, *, summed: bool
    ) -> None:
        """Read and convert one chunk from the peer's pool into ours. Give its staging blocks back when nothing uses them."""
        loop = asyncio.get_running_loop()
        try:
            part = self._transfer.read(
                read.peer, region, chunk.remote, slots, deadline_s=max(due_s - loop.time(), 0.0), into=lane.blocks.region
            )
        except PdserveError as exc:  # nothing was posted
            read.fail(exc)
            lane.slots.give_back(read.peer, slots)
            return
        await self._arrival(read, part)
        if summed:
            await self._convert(read, lambda: chunk.sums.extend(lane.blocks.sums(slots)))
        await self._convert(read, partial(lane.blocks.convert, slots, chunk.local, chunk.tokens))
        lane.slots.give_back(read.peer, slots)

    async def _arrival(self, read: BlockRead, part: BlockRead) -> None:
        """Return when the transport no longer uses the staging blocks. A failure goes to the read's result at once."""
        await asyncio.wait([part.result])
        if (error := part.result.exception()) is not None:
            assert isinstance(error, PdserveError)
            read.fail(error)
        await part.stopped

    async def _convert(self, read: BlockRead, work: Callable[[], None]) -> None:
        """Return when the converter no longer uses the staging blocks and ours."""
        async with self._converting:
            if read.result.done():
                return  # nobody waits for the result, so the work need not begin
            stuck = f"a conversion of KV has not ended within {self._stuck_after_s:.0f} s"
            timer = asyncio.get_running_loop().call_later(self._stuck_after_s, self._transfer.become_unhealthy, stuck)
            try:
                await self._converter.run(work)
            except Exception as exc:
                log.exception("converting KV of peer %016x", read.peer)
                read.fail(InternalBug(f"converting KV: {exc!r}"))
            finally:
                timer.cancel()

    def deadline_s(self, peer: Incarnation, nbytes: int, config: LeaseConfig) -> float:
        """Return the seconds that a read of `nbytes` may take when it is posted now."""
        return self._transfer.deadline_s(peer, nbytes, config)


class _StagedSource:
    """The source for the blocks of one KV group of a ticket. See `kvtransfer.thread.BlockSource`."""

    def __init__(self, staging: Staging, lane: _Lane, ticket: Ticket, block_ids: Sequence[int]) -> None:
        self._staging = staging
        self._lane = lane
        self._summed = ticket.checksums
        self._block_size = ticket.kv_spec.block_size
        self._last_block = block_ids[-1]
        self._last_tokens = ticket.prompt_len - (len(block_ids) - 1) * self._block_size

    def deadline_s(self, peer: Incarnation, nbytes: int, config: LeaseConfig) -> float:
        return self._staging.deadline_s(peer, nbytes + self._lane.waiting_bytes, config)

    def read(
        self,
        peer: Incarnation,
        region: AnyRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        deadline_s: float,
    ) -> BlockRead:
        """Start a read. It never raises: a chunk that cannot be posted fails the result."""
        loop = asyncio.get_running_loop()
        read = BlockRead(peer, len(local_blocks) * region.block_bytes, loop)
        late = TransferFailed(f"{len(local_blocks)} blocks from peer {peer:016x} took more than {deadline_s:.1f} s to convert")
        read.timers = [loop.call_later(deadline_s, read.fail, late)]
        chunks = list(self._chunks(tuple(remote_blocks), tuple(local_blocks)))
        self._lane.waiting_bytes += read.nbytes
        self._staging.spawn(self._carry(read, region, chunks, loop.time() + deadline_s))
        return read

    def _chunks(self, remote: tuple[int, ...], local: tuple[int, ...]) -> Iterator[_Chunk]:
        size = self._staging.chunk_blocks
        for first in range(0, len(remote), size):
            blocks = slice(first, first + size)
            tokens = len(remote[blocks]) * self._block_size
            if remote[blocks][-1] == self._last_block:
                tokens += self._last_tokens - self._block_size
            yield _Chunk(remote[blocks], local[blocks], tokens)

    async def _carry(self, read: BlockRead, region: AnyRegion, chunks: list[_Chunk], due_s: float) -> None:
        """Move chunk after chunk until nobody waits for the result. One chunk moves while the next waits for its blocks."""
        staging, lane = self._staging, self._lane
        began_s = asyncio.get_running_loop().time()
        waiting_bytes = read.nbytes
        moves = []
        try:
            for chunk in chunks:
                slots = await self._take(read, len(chunk.local))
                if slots is None:
                    break
                posted_bytes = len(slots) * region.block_bytes
                lane.waiting_bytes -= posted_bytes
                waiting_bytes -= posted_bytes
                move = staging.move(read, lane, chunk, region, slots, due_s, summed=self._summed)
                moves.append(staging.spawn(move))
        finally:
            lane.waiting_bytes -= waiting_bytes
        await asyncio.gather(*moves)
        sums = tuple(block_sum for chunk in chunks for block_sum in chunk.sums)
        read.succeed(asyncio.get_running_loop().time() - began_s, (sums,) if sums else ())
        read.mark_stopped()

    async def _take(self, read: BlockRead, count: int) -> Slots | None:
        """Wait for `count` staging blocks. Return None when the read has its result, so that nobody waits for them."""
        pool = self._lane.slots
        granted = pool.take(read.peer, count)
        either: list[asyncio.Future[Any]] = [granted, read.result]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if read.result.done():
            pool.leave(read.peer, granted)
            return None
        return granted.result()
