"""The simulated transfer thread: the production code of the loop's side, over reads that copy tags block by block.

Production's `RoutedTransport` cuts a read into its routes, each from a rank of the peer to a rank of ours, and says what their
ends amount to. Each route copies each block at a time of its own, so a block that is freed and written again during a read
gives wrong tags. A route may be slow, may fail cleanly, may fail while it goes on writing, or may never end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from kvtransfer.api import AnyRegion, KvRegion, ReadAdrift, Region, TransportRead
from kvtransfer.routed import RoutedTransport
from kvtransfer.thread import (
    Command,
    Connect,
    Connected,
    Event,
    Post,
    ReadDone,
    ReadFailed,
    Stop,
    TransferThread,
)
from pdserve.core.blocks import SumBlocks
from pdserve.core.errors import TransferFailed
from pdserve.core.ids import Incarnation
from sim.faults.engine import SimMemory
from sim.faults.oracle import BLOCK_SIZE
from sim.world.network import GIVE_UP_S, Network
from sim.world.process import Process

BLOCK_S: Final = 0.0005
LOOK_AGAIN_S: Final = 0.05  # the pause between two looks at a path that is cut


@dataclass(slots=True)
class ReadFaults:
    """The faults of routes of reads, as shares of all routes from 0 to 1. Workers of one rank have one route for each read."""

    slow: float = 0.0  # these take up to `slow_s` longer
    slow_s: float = 0.0
    failed: float = 0.0  # these fail and write nothing more
    adrift: float = 0.0  # these fail and go on writing
    stuck: float = 0.0  # these never end
    flipped: float = 0.0  # this share of blocks arrives with one wrong bit
    own_network: bool = False  # KV has a separate network, so a cut path does not stop it


@dataclass(frozen=True, slots=True)
class SimPart:
    """The part of some memory that one rank stores."""

    memory: SimMemory
    rank: int

    def places_in(self, region: Region) -> list[int]:
        """Return the places of the cells of a block that a read of this part copies, in order."""
        places, step = self.memory.places[self.rank], self.memory.cell_bytes()
        pieces = zip(region.offsets, region.lengths, strict=True)
        return [places[at // step] for first, nbytes in pieces for at in range(first, first + nbytes, step)]


Parts = Mapping[Region, SimPart]
"""The parts that one rank stores, by their regions of whole blocks."""


def region_of(memory: SimMemory, address: int) -> KvRegion:
    """Return the region of some memory. Each rank has its part at this address."""
    count, layout = len(memory.blocks), memory.layout
    parts = [(share, Region(address, count, share.of(layout).block_bytes)) for share in memory.shares]
    return KvRegion(layout, tuple(parts))


@dataclass(slots=True)
class SimPools:
    """The memory of each rank of each worker's incarnation, by the rank's id, and the faults of reads from it."""

    by_rank: dict[Incarnation, tuple[Process, Parts]] = field(default_factory=dict)
    faults: ReadFaults = field(default_factory=ReadFaults)

    def add(self, rank: Incarnation, process: Process, parts: Parts) -> None:
        """Let others read the memory of a rank. `process` is the whole worker."""
        self.by_rank[rank] = process, parts

    def forget(self, rank: Incarnation) -> None:
        """Let reads from this rank fail from now on."""
        self.by_rank.pop(rank, None)


class SimTransfer(TransferThread):
    """The transfer thread of one worker. `reached` is called for each step of a read, at the reader and at the peer."""

    def __init__(
        self,
        process: Process,
        memory: Mapping[KvRegion, SimMemory],
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
        self._adrift = 0  # the routes that go on writing although they have failed
        self._posts: dict[TransportRead, Post] = {}
        self.lost_ranks: set[int] = set()
        """Our ranks that have died."""
        self.parts: dict[int, dict[Region, SimPart]] = {}
        """The memory into which routes of each of our ranks go: the pool, and staging blocks."""
        for region, blocks in memory.items():
            self.add(region, blocks)
        self._transport = RoutedTransport({rank: _RankTransport(rank, self._start_route) for rank in self.parts})

    def add(self, region: KvRegion, memory: SimMemory) -> None:
        """Let reads go into some memory."""
        for share, of_rank in region.parts:
            self.parts.setdefault(share.rank, {})[of_rank] = SimPart(memory, share.rank)

    async def start(self) -> bytes:
        """Start without a thread, and return the agent's metadata."""
        self._loop = asyncio.get_running_loop()
        self._thread = cast(Any, _NoThread())
        self._metadata = self._loop.create_future()
        self._metadata.set_result(self._transport.metadata())
        self._ended = self._loop.create_future()
        return await self._metadata

    # The methods below run on the transfer thread's loop.

    def _on_command(self, command: Command) -> None:
        match command:
            case Connect():
                self._process.transfer_loop.call_later(self._network.delay_s(), self._connect, command, GIVE_UP_S)
            case Post():
                self._post(command)
            case Stop():
                self._stopped = True
                self._process.loop.call_soon_threadsafe(self._on_ended, None, not self._adrift)

    def _connect(self, command: Connect, patience_s: float) -> None:
        peer = self._peer(command.incarnation)
        if peer is not None and not self._joined(peer[0]) and patience_s > 0:
            self._later(LOOK_AGAIN_S, self._connect, command, patience_s - LOOK_AGAIN_S)
            return
        reached = peer is not None and self._joined(peer[0])
        if reached:
            self._transport.connect(command.incarnation, command.metadata)
        self._emit(Connected(command.incarnation, None if reached else TransferFailed("the peer is gone")))

    def _post(self, post: Post) -> None:
        peer = self._peer(post.peer)
        self._reached("read_posted", self._process)
        if peer is not None:
            self._reached("read_posted", peer[0])
        if not self._process.alive:
            return
        assert isinstance(post.region, KvRegion)
        assert isinstance(post.into, KvRegion)
        try:
            handle = self._transport.post_read(post.peer, post.region, post.remote_blocks, post.local_blocks, post.into)
        except TransferFailed as exc:
            self._emit(ReadFailed(post.read_id, exc, stopped=True))
        else:
            self._posts[handle] = post

    def _start_route(self, route: SimRoute) -> None:
        faults, roll = self._pools.faults, self._rng.random()
        span_s = BLOCK_S * len(route.pairs)
        self._rng.shuffle(route.pairs)
        if roll < faults.slow:
            span_s += self._rng.random() * faults.slow_s
        elif roll < faults.slow + faults.failed:
            route.pairs = route.pairs[: 1 + len(route.pairs) // 2]
            route.fails = True
        elif roll < faults.slow + faults.failed + faults.adrift:
            self._later(span_s / 2, self._end, route, ReadAdrift("lost sight of the read"))
            span_s += self._rng.random() * 2
            route.is_adrift = True
            self._adrift += 1
        elif roll < faults.slow + faults.failed + faults.adrift + faults.stuck:
            return
        cuts = sorted(self._rng.random() for _ in route.pairs[1:])
        self._copy(route, [(b - a) * span_s for a, b in zip([0.0, *cuts], [*cuts, 1.0], strict=True)])

    def _copy(self, route: SimRoute, waits_s: list[float]) -> None:
        """Copy one block after the other, each after a wait, then end the route. One that is adrift has ended for its asker,
        and goes on after the transport has stopped."""
        if not route.pairs:
            self._finish(route, TransferFailed("the read failed") if route.fails else None)
            return
        self._later(waits_s[0], self._copy_block, route, waits_s, GIVE_UP_S, adrift=route.is_adrift)

    def _copy_block(self, route: SimRoute, waits_s: list[float], patience_s: float) -> None:
        if (self._stopped and not route.is_adrift) or route.rank in self.lost_ranks:
            return
        peer = self._peer(route.peer)
        if peer is None:
            self._finish(route, TransferFailed("the peer disconnected"))
            return
        if not self._joined(peer[0]):
            if patience_s > 0:
                left_s = patience_s - LOOK_AGAIN_S
                self._later(LOOK_AGAIN_S, self._copy_block, route, waits_s, left_s, adrift=route.is_adrift)
            else:
                self._finish(route, TransferFailed("the peer was not reached"))
            return
        remote, local = route.pairs[0]
        source, target = peer[1][route.region.whole], self.parts[route.rank][route.into.whole]
        cells = [list(source.memory.blocks[remote][place]) for place in source.places_in(route.region)]
        if self._pools.faults.flipped and self._rng.random() < self._pools.faults.flipped:
            self._rng.choice(cells)[self._rng.randrange(BLOCK_SIZE)] ^= 1 << self._rng.randrange(40)
        target.memory.copy_in(local, target.places_in(route.into), cells)
        route.pairs = route.pairs[1:]
        self._copy(route, waits_s[1:])

    def _finish(self, route: SimRoute, error: TransferFailed | None) -> None:
        """End a route that writes no more."""
        if route.is_adrift:
            self._adrift -= 1
        else:
            self._end(route, error)

    def _end(self, route: SimRoute, error: TransferFailed | None) -> None:
        """Let the transport look at all reads, because a route has ended."""
        route.ended, route.error = True, error
        for handle, post in list(self._posts.items()):
            try:
                done = self._transport.poll(handle)
            except TransferFailed as exc:
                del self._posts[handle]
                if not isinstance(exc, ReadAdrift):
                    self._reached("read_done", self._process)
                self._emit(ReadFailed(post.read_id, exc, stopped=not isinstance(exc, ReadAdrift)))
            else:
                if done:
                    del self._posts[handle]
                    self._reached("read_done", self._process)
                    sums = post.sum_blocks(post.local_blocks) if post.sum_blocks is not None else ()
                    self._emit(ReadDone(post.read_id, BLOCK_S * len(post.local_blocks), sums))

    def _emit(self, event: Event) -> None:
        if not self._stopped:
            self._process.loop.call_soon_threadsafe(self._on_event, event)

    def _later(self, delay_s: float, callback: Callable[..., None], *args: Any, adrift: bool = False) -> None:
        if adrift or not self._stopped:
            self._process.transfer_loop.call_later(delay_s, callback, *args)

    def _joined(self, peer: Process) -> bool:
        return self._pools.faults.own_network or self._network.joined(self._process, peer)

    def _peer(self, rank: Incarnation) -> tuple[Process, Parts] | None:
        peer = self._pools.by_rank.get(rank)
        return peer if peer is not None and peer[0].alive else None


class SimRoute(TransportRead):
    """The part of a read between a rank of the peer and one of ours. `pairs` are the blocks that it has still to copy."""

    def __init__(self, rank: int, peer: Incarnation, region: Region, pairs: list[tuple[int, int]], into: Region) -> None:
        super().__init__(peer, len(pairs))
        self.rank = rank
        self.region = region
        self.into = into
        self.pairs = pairs
        self.fails = False
        self.is_adrift = False
        self.ended = False
        self.error: TransferFailed | None = None


class _RankTransport:
    """The transport of one of our ranks. Any peer is connected."""

    def __init__(self, rank: int, start: Callable[[SimRoute], None]) -> None:
        self._rank = rank
        self._start = start

    def metadata(self) -> bytes:
        return b""

    def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        """Do nothing."""

    def disconnect(self, incarnation: Incarnation) -> None:
        """Do nothing."""

    def post_read(
        self,
        peer: Incarnation,
        region: Region,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        into: Region,
    ) -> TransportRead:
        route = SimRoute(self._rank, peer, region, list(zip(remote_blocks, local_blocks, strict=True)), into)
        self._start(route)
        return route

    def poll(self, handle: TransportRead) -> bool:
        assert isinstance(handle, SimRoute)
        if handle.error is not None:
            raise handle.error
        return handle.ended

    def close(self) -> None:
        """Do nothing."""


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


def _sums_of(memory: Mapping[KvRegion, SimMemory]) -> dict[AnyRegion, SumBlocks]:
    return {region: blocks.sums for region, blocks in memory.items()}


def _no_transport() -> Any:
    raise AssertionError("the simulated transfer thread makes no transport")
