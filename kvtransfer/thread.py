"""The transfer thread, and the reads of KV blocks that it makes. This one thread makes, uses and ends a worker's transport.

Only the loop gives commands, and it gets every answer by `call_soon_threadsafe`. Deadlines are timers on the loop, so they
hold also while the transport blocks in a copy. A deadline ends the wait for a read but not the read: its local blocks
belong to the transport until `BlockRead.stopped`.

The `Reactor` is what runs in the thread: it takes commands, polls reads, and reports their ends. It sums the blocks of a read
that has arrived before it reports the read: a handover to another thread would take as long as the sums of a chunk. Meanwhile
other reads go on, unless the transport needs this thread to copy. The reactor does not know asyncio: its answers leave through
`emit`. With no read in flight it blocks on its queue and costs nothing. With reads in flight it polls with back-off, because
the transport offers nothing to wait on.

A `Pace` is the measured speed of reads from one peer, which sets the deadlines of further reads. Reads from one peer share one
link, so the deadline of a new read includes the bytes that are under way before it. The speed is measured over stretches of
time in which a read was under way. A measured speed can only lengthen deadlines: a link that was fast so far may now be
shared, and a deadline that is too short costs a retry over the same slow link.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any, Final, NewType, Protocol

from kvtransfer.api import AnyRegion, ReadAdrift, Transport, TransportRead
from pdserve.config import LeaseConfig
from pdserve.core.blocks import SumBlocks
from pdserve.core.errors import InternalBug, PdserveError, ReplicaLost, TransferFailed
from pdserve.core.ids import BlockSum, Incarnation


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of one read. `duration_s` runs from the post to the arrival of the last byte. `sums` has the checksums of the
    blocks as they arrived, in order, for each KV group that was read; empty: checksums are off."""

    nbytes: int
    duration_s: float
    sums: tuple[tuple[BlockSum, ...], ...] = ()


class BlockRead:
    """One read, with two futures that may end at different times. The asker waits for `result`; its local blocks are its own
    again once `stopped` is done.

    Only the `BlockSource` that made the read calls the methods, except `give_up`, which the asker may call.
    """

    def __init__(self, peer: Incarnation, nbytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.peer = peer
        self.nbytes = nbytes
        self.result: asyncio.Future[ReadResult] = loop.create_future()
        """The future of the result. It raises `TransferFailed` on failure or past the deadline, and `ReplicaLost` when the
        transfer thread died."""
        self.result.add_done_callback(mark_retrieved)
        self.timers: list[asyncio.TimerHandle] = []
        self._stopped: asyncio.Future[None] = loop.create_future()

    @property
    def stopped(self) -> asyncio.Future[None]:
        """A future that is done when nothing will write into the local blocks again. Its cancellation changes nothing."""
        return asyncio.shield(self._stopped)

    @property
    def is_stopped(self) -> bool:
        """True when nothing will write into the local blocks again."""
        return self._stopped.done()

    def give_up(self) -> None:
        """Cancel the result, because nobody waits for it. A posted read goes on; another one need not be posted. Idempotent."""
        self.result.cancel()

    def succeed(self, duration_s: float, sums: tuple[tuple[BlockSum, ...], ...] = ()) -> None:
        """Set the result, unless the read has one already."""
        if not self.result.done():
            self.result.set_result(ReadResult(self.nbytes, duration_s, sums))

    def fail(self, error: PdserveError) -> None:
        """Set the error as the result, unless the read has one already."""
        if not self.result.done():
            self.result.set_exception(error)

    def fail_late(self, blocks: int, deadline_s: float) -> None:
        """Set the error of a read whose time is over."""
        self.fail(TransferFailed(f"a read of {blocks} blocks from peer {self.peer:016x} took more than {deadline_s:.1f} s"))

    def mark_stopped(self) -> None:
        """Note that nothing will write into the local blocks again. Idempotent."""
        for timer in self.timers:
            timer.cancel()
        if not self._stopped.done():
            self._stopped.set_result(None)


class BlockSource(Protocol):
    """The object that copies a peer's blocks of one KV group into ours for a pull: a `PoolSource`, or a source of `Staging` if
    the peer stores KV in another dtype."""

    def read(
        self,
        peer: Incarnation,
        region: AnyRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        deadline_s: float,
    ) -> BlockRead:
        """Start a read, as `TransferThread.read` does, into this source's blocks. If this raises, nothing was posted."""
        ...

    def deadline_s(self, peer: Incarnation, nbytes: int, config: LeaseConfig) -> float:
        """Return the seconds that a read of `nbytes` may take from now on, with the reads that are under way before it."""
        ...


@dataclass(frozen=True, slots=True)
class PoolSource:
    """The source that reads straight into one KV group of our pool."""

    transfer: TransferThread
    region: AnyRegion

    def read(
        self,
        peer: Incarnation,
        region: AnyRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        deadline_s: float,
    ) -> BlockRead:
        """Start a read into the group's region."""
        return self.transfer.read(peer, region, remote_blocks, local_blocks, deadline_s=deadline_s, into=self.region)

    def deadline_s(self, peer: Incarnation, nbytes: int, config: LeaseConfig) -> float:
        """Return the seconds that a read of `nbytes` may take from now on."""
        return self.transfer.deadline_s(peer, nbytes, config)


def mark_retrieved(future: asyncio.Future[Any]) -> None:
    """Fetch a future's error, so that asyncio does not complain when the asker has left and nobody else fetches it."""
    if not future.cancelled():
        future.exception()


STRETCH_BYTES: Final = 256 << 10
STRETCH_S: Final = 0.1
"""A stretch has at least so many bytes and seconds. A shorter one measures latency, or the moment when two reads end."""
NEWEST_WEIGHT: Final = 0.5
"""The weight of the newest stretch in the running mean. A link that gets slow shows clearly after two stretches."""
PATIENCE: Final = 4.0
"""A read is given up when it takes so many times the expected time."""


class Pace:
    """The speed and the load of the link to one peer. `now_s` is the caller's clock."""

    def __init__(self) -> None:
        self.in_flight_bytes = 0
        self.bytes_s: float | None = None
        """The measured bytes a second. None until the first stretch has ended."""
        self._busy_since_s = 0.0  # reads have been under way since then; the stretch does not count this time yet
        self._stretch_s = 0.0
        self._stretch_bytes = 0

    def posted(self, nbytes: int, *, now_s: float) -> None:
        """Note that a read was posted."""
        if self.in_flight_bytes == 0:
            self._busy_since_s = now_s
        self.in_flight_bytes += nbytes

    def ended(self, nbytes: int, *, arrived: bool, now_s: float) -> None:
        """Note that a read has stopped. `arrived` False: the read failed, so it tells nothing about the speed."""
        self.in_flight_bytes -= nbytes
        if arrived:
            self._stretch_s += now_s - self._busy_since_s
            self._stretch_bytes += nbytes
            if self._stretch_bytes >= STRETCH_BYTES and self._stretch_s >= STRETCH_S:
                self._measure(self._stretch_bytes / self._stretch_s)
        else:
            self._measure(None)
        self._busy_since_s = now_s

    def deadline_s(self, nbytes: int, config: LeaseConfig) -> float:
        """Return the seconds that a read of `nbytes` may take when it is posted now."""
        bytes_s = config.transfer_bandwidth_bytes_s
        if self.bytes_s is not None:
            bytes_s = min(bytes_s, self.bytes_s)
        return config.transfer_deadline_floor_s + PATIENCE * (self.in_flight_bytes + nbytes) / bytes_s

    def _measure(self, newest: float | None) -> None:
        """End a stretch. `newest` is its speed in bytes a second; None: a read failed, so the stretch does not count."""
        if newest is not None:
            before = newest if self.bytes_s is None else self.bytes_s
            self.bytes_s = before + NEWEST_WEIGHT * (newest - before)
        self._stretch_s, self._stretch_bytes = 0.0, 0


logger = logging.getLogger(__name__)

ReadId = NewType("ReadId", int)


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
    region: AnyRegion
    remote_blocks: tuple[int, ...]
    local_blocks: tuple[int, ...]
    deadline_s: float
    into: AnyRegion
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

    def __init__(self, transport: Transport[Any], commands: Queue[Command], emit: Callable[[Event], None]) -> None:
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


MAX_READS: Final = 1024  # most reads that have not stopped, over all peers; a full batch of sequences has 64 reads
START_TIMEOUT_S: Final = 60.0  # importing NIXL and registering a large pool takes seconds on a loaded machine
CONNECT_TIMEOUT_S: Final = 10.0


class TransferThread:
    """A worker's transfer thread. It is made, called and closed on one loop. `factory` makes the transport in the thread."""

    def __init__(
        self,
        factory: Callable[[], Transport[Any]],
        *,
        stuck_after_s: float = 120.0,
        max_reads: int = MAX_READS,
        sum_blocks: Mapping[AnyRegion, SumBlocks] | None = None,
    ) -> None:
        self.unhealthy = asyncio.Event()
        """Set when a read has not stopped within `stuck_after_s`, or when the thread died. This process must then end."""
        self.unhealthy_reason = ""
        self._factory = factory
        self._stuck_after_s = stuck_after_s
        self._max_reads = max_reads
        self.sum_blocks = dict(sum_blocks or {})
        """Functions that sum blocks of our regions. Reads into a region that has one here bring the sums of their blocks."""
        self._commands: Queue[Command] = Queue()
        self._reads: dict[ReadId, BlockRead] = {}
        self._paces: dict[Incarnation, Pace] = {}
        self._parted: set[Incarnation] = set()
        """Peers that were disconnected, whose pace is kept only until their last read has stopped."""
        self._last_read_id = 0
        self._connected: set[Incarnation] = set()
        self._connecting: dict[Incarnation, asyncio.Future[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._metadata: asyncio.Future[bytes] | None = None
        self._ended: asyncio.Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    async def start(self) -> bytes:
        """Start the thread, make the transport, and return its metadata. Call `close` afterwards in any case.

        Raises what `factory` raises, and `TransferFailed` after `START_TIMEOUT_S`.
        """
        assert self._thread is None, "started twice"
        self._loop = asyncio.get_running_loop()
        self._metadata = self._loop.create_future()
        self._metadata.add_done_callback(mark_retrieved)
        self._ended = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="pdserve-transfer", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                return await asyncio.shield(self._metadata)
        except TimeoutError as exc:
            raise TransferFailed(f"the transport did not start within {START_TIMEOUT_S:.0f} s") from exc

    async def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        """Connect to a peer; connect again after a read of it has failed. Return at once when the peer is connected.

        Raises `TransferFailed`, also after `CONNECT_TIMEOUT_S`, and `ReplicaLost` when the thread died.
        """
        if incarnation in self._connected:
            return
        self._check_usable()
        self._parted.discard(incarnation)
        answer = self._connecting.get(incarnation)
        if answer is None:
            answer = self._connecting[incarnation] = self._live_loop().create_future()
            answer.add_done_callback(mark_retrieved)
            self._commands.put(Connect(incarnation, metadata))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):  # `wait_for` would lose an abort that comes with the answer
                await asyncio.shield(answer)
        except TimeoutError as exc:
            raise TransferFailed(f"peer {incarnation:016x} was not connected within {CONNECT_TIMEOUT_S:.0f} s") from exc

    def disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer once its last read has stopped. Do nothing for an unknown one."""
        self._connected.discard(incarnation)
        self._commands.put(Disconnect(incarnation))  # after a failed read it is not connected, but not yet forgotten either
        self._parted.add(incarnation)
        self._drop_pace(incarnation)

    def read(
        self,
        peer: Incarnation,
        region: AnyRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        deadline_s: float,
        into: AnyRegion,
    ) -> BlockRead:
        """Copy remote_blocks[i] of `region` into local_blocks[i] of our `into` within `deadline_s` from now.

        If it raises, nothing was posted. Raises `TransferFailed` when closing or when too many reads have not stopped, and
        `ReplicaLost` when the thread died.
        """
        self._check_usable()
        if len(self._reads) >= self._max_reads:
            raise TransferFailed(f"{len(self._reads)} reads have not stopped: no more are posted")
        loop = self._live_loop()
        read = BlockRead(peer, len(local_blocks) * region.block_bytes, loop)
        self._last_read_id += 1
        read_id = ReadId(self._last_read_id)
        stuck = f"a read from peer {peer:016x} has not stopped within {self._stuck_after_s:.0f} s"
        read.timers = [
            loop.call_later(deadline_s, read.fail_late, len(local_blocks), deadline_s),
            loop.call_later(self._stuck_after_s, self.become_unhealthy, stuck),
        ]
        self._reads[read_id] = read
        self.pace(peer).posted(read.nbytes, now_s=loop.time())
        due_s, sum_blocks = loop.time() + deadline_s, self.sum_blocks.get(into)
        post = Post(read_id, peer, region, tuple(remote_blocks), tuple(local_blocks), due_s, into, sum_blocks)
        self._commands.put(post)
        return read

    def deadline_s(self, peer: Incarnation, nbytes: int, config: LeaseConfig) -> float:
        """Return the seconds that a read of `nbytes` may take when it is posted now. See `Pace.deadline_s`."""
        return self.pace(peer).deadline_s(nbytes, config)

    def pace(self, peer: Incarnation) -> Pace:
        """Return the pace of reads from this peer; a new peer gets a new one."""
        return self._paces.setdefault(peer, Pace())

    @property
    def num_paces(self) -> int:
        """The number of peers whose pace is kept."""
        return len(self._paces)

    @property
    def num_unstopped(self) -> int:
        """The number of reads that may still write into local memory."""
        return len(self._reads)

    async def close(self, *, timeout_s: float = 5.0) -> None:
        """End the transport and the thread. Reads without a result fail with `TransferFailed`. Idempotent.

        After `timeout_s` the thread is left behind, blocked in the transport, and `unhealthy` is set: nobody knows whether it
        still writes, so its reads do not count as stopped.
        """
        if self._ended is None:
            return
        if not self._closing:
            self._closing = True
            self._commands.put(Stop())
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._ended)
        except TimeoutError:
            self.become_unhealthy(f"the transfer thread did not end within {timeout_s:.1f} s")
            self._fail_all(TransferFailed("the transfer thread is closing"), stopped=False)

    # In the transfer thread.

    def _run(self) -> None:
        transport: Transport[Any] | None = None
        error: BaseException | None = None
        try:
            transport = self._factory()
            self._tell(self._on_started, transport.metadata())
            Reactor(transport, self._commands, self._emit).run()
        except BaseException as exc:  # noqa: BLE001 - the loop must hear of it, whatever it is
            error = exc
        closed, close_error = _close(transport)
        self._tell(self._on_ended, error or close_error, closed)

    def _emit(self, event: Event) -> None:
        self._tell(self._on_event, event)

    def _tell(self, callback: Callable[..., None], *args: Any) -> None:
        try:
            self._live_loop().call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            logger.warning("the transfer thread outlived its event loop")

    # On the loop.

    def _on_started(self, metadata: bytes) -> None:
        assert self._metadata is not None
        self._metadata.set_result(metadata)

    def _on_event(self, event: Event) -> None:
        match event:
            case Connected():
                self._on_connected(event)
            case ReadDone():
                read = self._reads.pop(event.read_id)
                self._end_pace(read, arrived=True)
                read.succeed(event.duration_s, (event.sums,) if event.sums else ())
                read.mark_stopped()
            case ReadFailed():
                self._on_read_failed(event)

    def _on_connected(self, event: Connected) -> None:
        answer = self._connecting.pop(event.incarnation)
        if answer.done():
            return
        if event.error is None:
            self._connected.add(event.incarnation)
            answer.set_result(None)
        else:
            answer.set_exception(event.error)

    def _on_read_failed(self, event: ReadFailed) -> None:
        read = self._reads[event.read_id]
        self._connected.discard(read.peer)  # the next `connect` asks the transport again
        read.fail(event.error)
        if event.stopped:
            del self._reads[event.read_id]
            self._end_pace(read, arrived=False)
            read.mark_stopped()

    def _end_pace(self, read: BlockRead, *, arrived: bool) -> None:
        self.pace(read.peer).ended(read.nbytes, arrived=arrived, now_s=self._live_loop().time())
        if read.peer in self._parted:
            self._drop_pace(read.peer)

    def _drop_pace(self, peer: Incarnation) -> None:
        """Forget the pace of a disconnected peer. If a read of it has not stopped, the end of that read calls this again."""
        if self.pace(peer).in_flight_bytes == 0:
            del self._paces[peer]
            self._parted.discard(peer)

    def _on_ended(self, error: BaseException | None, closed: bool) -> None:
        assert self._ended is not None
        assert self._metadata is not None
        assert self._thread is not None
        self._thread.join()  # it has nothing left to do
        failure: PdserveError = TransferFailed("the transfer thread is closing")
        if error is not None:
            logger.error("the transfer thread died", exc_info=error)
            failure = ReplicaLost(f"the transfer thread died: {error!r}")  # its process ends now too
            self.become_unhealthy(failure.message)
        if not self._metadata.done():
            self._metadata.set_exception(error if isinstance(error, PdserveError) else failure)
        self._fail_all(failure, stopped=closed)
        self._ended.set_result(None)

    def _fail_all(self, error: PdserveError, *, stopped: bool) -> None:
        self._connected.clear()
        for answer in self._connecting.values():
            if not answer.done():
                answer.set_exception(error)
        for read in self._reads.values():
            read.fail(error)
            if stopped:
                read.mark_stopped()
        if stopped:
            self._reads.clear()

    def become_unhealthy(self, reason: str) -> None:
        """Set `unhealthy` with the first reason: a read or a conversion may write into local memory for ever."""
        if not self.unhealthy.is_set():
            logger.error("transfer: %s", reason)
            self.unhealthy_reason = reason
            self.unhealthy.set()

    def _check_usable(self) -> None:
        if self._ended is None:
            raise InternalBug("the transfer thread was not started")
        if self._closing:
            raise TransferFailed("the transfer thread is closing")
        if self._ended.done():
            raise ReplicaLost(self.unhealthy_reason)

    def _live_loop(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop


def _close(transport: Transport[Any] | None) -> tuple[bool, BaseException | None]:
    """Close the transport. Return (True, None) when nothing can write into local memory any more, else (False, the error)."""
    try:
        if transport is not None:
            transport.close()
    except BaseException as exc:  # noqa: BLE001 - reported to the loop with the thread's end
        return False, exc
    return True, None
