"""The reactor runs in the transfer thread: it takes commands, polls reads, and reports their ends.

It sums the blocks of a read that has arrived before it reports the read: a handover to another thread would take as long as
the sums of a chunk. Meanwhile other reads go on, unless the transport needs this thread to copy.

The reactor does not know asyncio: its answers leave through `emit`. With no read in flight it blocks on its queue and costs
nothing. With reads in flight it polls with back-off, because the transport offers nothing to wait on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Final, NewType, Protocol

from kvtransfer.api import LocalRegion, ReadAdrift, RemoteRegion, Transport, TransportRead
from pdserve.core.errors import InternalBug, PdserveError, TransferFailed
from pdserve.core.ids import BlockSum, Incarnation

logger = logging.getLogger(__name__)

ReadId = NewType("ReadId", int)


class SumBlocks(Protocol):
    """A function that returns checksums over all stored bytes of these blocks of one region, in order. It blocks, and any
    thread may call it."""

    def __call__(self, block_ids: Sequence[int], /) -> tuple[BlockSum, ...]: ...


POLL_MIN_S: Final = 50e-6  # a small read over TCP takes about 100 us
POLL_MAX_S: Final = 2e-3  # 500 polls a second of a slow read: about 1 % of a core


@dataclass(frozen=True, slots=True)
class Connect:
    """Command: make a peer readable."""

    incarnation: Incarnation
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Command: forget a peer when its last read has stopped, unless a `Connect` comes first."""

    incarnation: Incarnation


@dataclass(frozen=True, slots=True)
class Post:
    """Command: post a read. It is not posted when the monotonic clock has passed `deadline_s` before its turn comes.
    `sum_blocks` sums the local blocks once all have arrived; None: they are not summed."""

    read_id: ReadId
    peer: Incarnation
    region: RemoteRegion
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    deadline_s: float
    into: LocalRegion
    sum_blocks: SumBlocks | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """Command: end the reactor."""


Command = Connect | Disconnect | Post | Stop


@dataclass(frozen=True, slots=True)
class Connected:
    """Event: the answer to `Connect`. `error` None: the peer can be read."""

    incarnation: Incarnation
    error: TransferFailed | None


@dataclass(frozen=True, slots=True)
class ReadDone:
    """Event: all blocks have arrived. `sums` has the checksums of the local blocks, in order; empty: they were not summed."""

    read_id: ReadId
    duration_s: float
    sums: tuple[BlockSum, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """Event: a read has failed. The peer must be connected again after a `TransferFailed`. `stopped` False: the read may still
    write into local memory until the thread ends."""

    read_id: ReadId
    error: PdserveError
    stopped: bool


Event = Connected | ReadDone | ReadFailed


@dataclass(frozen=True, slots=True)
class _InFlight:
    handle: TransportRead
    post: Post
    posted_s: float


class Reactor:
    """The owner of a transport's reads. One thread uses it."""

    def __init__(self, transport: Transport, commands: Queue[Command], emit: Callable[[Event], None]) -> None:
        self._transport = transport
        self._commands = commands
        self._emit = emit
        self._reads: dict[ReadId, _InFlight] = {}
        self._adrift: set[Incarnation] = set()
        self._leaving: set[Incarnation] = set()

    def run(self) -> None:
        """Take commands and poll reads until `Stop`. This does not close the transport."""
        delay_s = POLL_MIN_S
        while True:
            command = self._next_command(delay_s if self._reads else None)
            if isinstance(command, Stop):
                return
            if command is not None:
                self._handle(command)
            progressed = self._poll_all()
            idle = command is None and not progressed
            delay_s = min(delay_s * 2, POLL_MAX_S) if idle else POLL_MIN_S

    def _next_command(self, timeout_s: float | None) -> Command | None:
        """Wait for a command. Return None when `timeout_s` has passed; `timeout_s` None waits without a limit."""
        # A `SimpleQueue` waits for ever when its thread is held up for longer than so short a timeout (CPython 3.11).
        try:
            return self._commands.get(timeout=timeout_s)
        except Empty:
            return None

    def _handle(self, command: Connect | Disconnect | Post) -> None:
        match command:
            case Connect():
                self._connect(command)
            case Disconnect():
                self._leave(command.incarnation)
            case Post():
                self._post(command)

    def _connect(self, command: Connect) -> None:
        self._leaving.discard(command.incarnation)
        self._poll_all()  # collects the reads that a broken connection has ended, before it is made anew
        try:
            self._transport.connect(command.incarnation, command.metadata)
        except TransferFailed as exc:
            self._emit(Connected(command.incarnation, exc))
            self._leave(command.incarnation)  # forgets what is left of a broken connection
        else:
            self._emit(Connected(command.incarnation, None))

    def _post(self, command: Post) -> None:
        now_s = time.monotonic()
        if now_s >= command.deadline_s:
            late = TransferFailed(f"a read of {len(command.local_blocks)} blocks missed its deadline before it was posted")
            self._emit(ReadFailed(command.read_id, late, stopped=True))
            return
        try:
            handle = self._transport.post_read(
                command.peer, command.region, command.remote_blocks, command.local_blocks, command.into
            )
        except TransferFailed as exc:
            self._fail(command.read_id, command.peer, exc)
        else:
            self._reads[command.read_id] = _InFlight(handle, command, now_s)

    def _poll_all(self) -> bool:
        """Poll all reads. Return True when one has ended."""
        progressed = False
        for read_id, read in list(self._reads.items()):
            progressed |= self._poll(read_id, read)
        return progressed

    def _poll(self, read_id: ReadId, read: _InFlight) -> bool:
        try:
            done = self._transport.poll(read.handle)
        except TransferFailed as exc:
            del self._reads[read_id]
            self._fail(read_id, read.handle.peer, exc)
            return True
        if done:
            del self._reads[read_id]
            self._emit(_arrived(read))
            self._leave_if_unused(read.handle.peer)
        return done

    def _fail(self, read_id: ReadId, peer: Incarnation, error: TransferFailed) -> None:
        """Report a failed read, and forget its peer once its other reads are over: a dead peer is never asked for again."""
        adrift = isinstance(error, ReadAdrift)
        if adrift:
            self._adrift.add(peer)
        self._emit(ReadFailed(read_id, error, stopped=not adrift))
        self._leave(peer)

    def _leave(self, peer: Incarnation) -> None:
        """Forget a peer as soon as none of its reads is in flight, unless a `Connect` comes first."""
        self._leaving.add(peer)
        self._leave_if_unused(peer)

    def _leave_if_unused(self, peer: Incarnation) -> None:
        """Forget a leaving peer, unless a read of it is in flight or adrift: a dropped connection would not stop the read."""
        if peer not in self._leaving or peer in self._adrift:
            return
        if all(read.handle.peer != peer for read in self._reads.values()):
            self._leaving.discard(peer)
            self._transport.disconnect(peer)


def _arrived(read: _InFlight) -> ReadDone | ReadFailed:
    post, duration_s = read.post, time.monotonic() - read.posted_s
    if post.sum_blocks is None:
        return ReadDone(post.read_id, duration_s)
    try:
        return ReadDone(post.read_id, duration_s, post.sum_blocks(post.local_blocks))
    except Exception as exc:
        logger.exception("summing KV of peer %016x", post.peer)
        return ReadFailed(post.read_id, InternalBug(f"summing KV: {exc!r}"), stopped=True)
