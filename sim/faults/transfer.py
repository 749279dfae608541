"""The simulated transfer thread: the production code of the loop's side, over reads that copy tags block by block.

Each block is copied at a time of its own, so a block that is freed and written again during a read gives wrong tags. A read
may be slow, may fail cleanly, may fail while it goes on writing, or may never end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, cast

from kvtransfer.api import LocalRegion, ReadAdrift, RemoteRegion
from kvtransfer.thread import (
    Command,
    Connect,
    Connected,
    Event,
    Post,
    ReadDone,
    ReadFailed,
    ReadId,
    Stop,
    TransferThread,
)
from pdserve.core.blocks import SumBlocks
from pdserve.core.errors import TransferFailed
from pdserve.core.ids import Incarnation
from sim.faults.engine import SimMemory
from sim.world.network import GIVE_UP_S, Network
from sim.world.process import Process

BLOCK_S: Final = 0.0005
LOOK_AGAIN_S: Final = 0.05  # the pause between two looks at a path that is cut


@dataclass(slots=True)
class ReadFaults:
    """The faults of reads, as shares of all reads from 0 to 1."""

    slow: float = 0.0  # these reads take up to `slow_s` longer
    slow_s: float = 0.0
    failed: float = 0.0  # these fail and write nothing more
    adrift: float = 0.0  # these fail and go on writing
    stuck: float = 0.0  # these never end
    flipped: float = 0.0  # this share of blocks arrives with one wrong bit
    own_network: bool = False  # KV has a separate network, so a cut path does not stop it


@dataclass(slots=True)
class SimPools:
    """The KV pool of each worker's incarnation, and the faults of reads from them."""

    by_incarnation: dict[Incarnation, tuple[Process, dict[RemoteRegion, SimMemory]]] = field(default_factory=dict)
    faults: ReadFaults = field(default_factory=ReadFaults)

    def forget(self, incarnation: Incarnation) -> None:
        """Let reads from this incarnation fail from now on."""
        self.by_incarnation.pop(incarnation, None)


class SimTransfer(TransferThread):
    """The transfer thread of one worker. `reached` is called for each step of a read, at the reader and at the peer."""

    def __init__(
        self,
        process: Process,
        memory: dict[LocalRegion, SimMemory],
        pools: SimPools,
        network: Network,
        rng: random.Random,
        reached: Callable[[str, Process], None],
        *,
        stuck_after_s: float,
        summed: bool,
    ) -> None:
        super().__init__(_no_transport, stuck_after_s=stuck_after_s, sum_blocks=_sums_of(memory) if summed else None)
        self._process = process
        self._pools = pools
        self._network = network
        self._rng = rng
        self._reached = reached
        self._commands = cast(Any, _Inbox(process, self._on_command))
        self._stopped = False
        self._adrift = 0  # the reads that go on writing although they have failed
        self.memory = dict(memory)
        """The memory of each region into which reads go: the pool, and staging blocks."""

    async def start(self) -> bytes:
        """Start without a thread, and return the agent's metadata."""
        self._loop = asyncio.get_running_loop()
        self._thread = cast(Any, _NoThread())
        self._metadata = self._loop.create_future()
        self._metadata.set_result(self._process.name.encode())
        self._ended = self._loop.create_future()
        return await self._metadata

    # The methods below run on the transfer thread's loop.

    def _on_command(self, command: Command) -> None:
        match command:
            case Connect(incarnation):
                self._process.transfer_loop.call_later(self._network.delay_s(), self._connect, incarnation, GIVE_UP_S)
            case Post():
                self._post(command)
            case Stop():
                self._stopped = True
                self._process.loop.call_soon_threadsafe(self._on_ended, None, not self._adrift)

    def _connect(self, incarnation: Incarnation, patience_s: float) -> None:
        peer = self._peer(incarnation)
        if peer is not None and not self._joined(peer[0]) and patience_s > 0:
            self._later(LOOK_AGAIN_S, self._connect, incarnation, patience_s - LOOK_AGAIN_S)
            return
        reached = peer is not None and self._joined(peer[0])
        self._emit(Connected(incarnation, None if reached else TransferFailed("the peer is gone")))

    def _post(self, post: Post) -> None:
        peer = self._peer(post.peer)
        self._reached("read_posted", self._process)
        if peer is not None:
            self._reached("read_posted", peer[0])
        if not self._process.alive:
            return
        faults, roll = self._pools.faults, self._rng.random()
        span_s = BLOCK_S * len(post.local_blocks)
        end: Event = ReadDone(post.read_id, span_s)
        pairs = list(zip(post.remote_blocks, post.local_blocks, strict=True))
        self._rng.shuffle(pairs)
        if roll < faults.slow:
            span_s += self._rng.random() * faults.slow_s
        elif roll < faults.slow + faults.failed:
            pairs = pairs[: 1 + len(pairs) // 2]
            end = ReadFailed(post.read_id, TransferFailed("the read failed"), stopped=True)
        elif roll < faults.slow + faults.failed + faults.adrift:
            self._later(span_s / 2, self._emit, ReadFailed(post.read_id, ReadAdrift("lost sight of the read"), stopped=False))
            span_s += self._rng.random() * 2
            self._adrift += 1
            self._copy(post, pairs, self._spread(span_s, len(pairs)), None)
            return
        elif roll < faults.slow + faults.failed + faults.adrift + faults.stuck:
            return
        self._copy(post, pairs, self._spread(span_s, len(pairs)), end)

    def _spread(self, span_s: float, count: int) -> list[float]:
        """Draw `count` waits whose sum is `span_s`."""
        cuts = sorted(self._rng.random() for _ in range(count - 1))
        return [(b - a) * span_s for a, b in zip([0.0, *cuts], [*cuts, 1.0], strict=True)]

    def _copy(self, post: Post, pairs: list[tuple[int, int]], waits_s: list[float], end: Event | None) -> None:
        """Copy one block after the other, then emit `end`. None: the read is adrift, so nothing is emitted, and it goes on
        after the transport has stopped."""
        if not pairs:
            if end is None:
                self._adrift -= 1
            else:
                self._reached("read_done", self._process)
                if isinstance(end, ReadDone) and post.sum_blocks is not None:
                    end = replace(end, sums=post.sum_blocks(post.local_blocks))
                self._emit(end)
            return
        self._later(waits_s[0], self._copy_block, post, pairs, waits_s, end, GIVE_UP_S, adrift=end is None)

    def _copy_block(
        self, post: Post, pairs: list[tuple[int, int]], waits_s: list[float], end: Event | None, patience_s: float
    ) -> None:
        if self._stopped and end is not None:
            return
        peer = self._peer(post.peer)
        if peer is None:
            self._lost(post.read_id, end, "the peer disconnected")
            return
        if not self._joined(peer[0]):
            if patience_s > 0:
                left_s = patience_s - LOOK_AGAIN_S
                self._later(LOOK_AGAIN_S, self._copy_block, post, pairs, waits_s, end, left_s, adrift=end is None)
            else:
                self._lost(post.read_id, end, "the peer was not reached")
            return
        remote, local = pairs[0]
        into = self.memory[post.into]
        tags = list(peer[1][post.region].blocks[remote])
        if self._pools.faults.flipped and self._rng.random() < self._pools.faults.flipped:
            tags[self._rng.randrange(len(tags))] ^= 1 << self._rng.randrange(40)
        into.copy_in(local, tags)
        self._copy(post, pairs[1:], waits_s[1:], end)

    def _lost(self, read_id: ReadId, end: Event | None, reason: str) -> None:
        if end is None:
            self._adrift -= 1
        else:
            self._emit(ReadFailed(read_id, TransferFailed(reason), stopped=True))

    def _emit(self, event: Event) -> None:
        if not self._stopped:
            self._process.loop.call_soon_threadsafe(self._on_event, event)

    def _later(self, delay_s: float, callback: Callable[..., None], *args: Any, adrift: bool = False) -> None:
        if adrift or not self._stopped:
            self._process.transfer_loop.call_later(delay_s, callback, *args)

    def _joined(self, peer: Process) -> bool:
        return self._pools.faults.own_network or self._network.joined(self._process, peer)

    def _peer(self, incarnation: Incarnation) -> tuple[Process, dict[RemoteRegion, SimMemory]] | None:
        peer = self._pools.by_incarnation.get(incarnation)
        return peer if peer is not None and peer[0].alive else None


class _Inbox:
    """The queue of commands. The transfer thread's loop handles each command that is put into it."""

    def __init__(self, process: Process, handle: Callable[[Command], None]) -> None:
        self._process = process
        self._handle = handle

    def put(self, command: Command) -> None:
        self._process.transfer_loop.call_soon(self._handle, command)


class _NoThread:
    def join(self) -> None:
        pass


def _sums_of(memory: dict[LocalRegion, SimMemory]) -> dict[LocalRegion, SumBlocks]:
    return {region: blocks.sums for region, blocks in memory.items()}


def _no_transport() -> Any:
    raise AssertionError("the simulated transfer thread makes no transport")
