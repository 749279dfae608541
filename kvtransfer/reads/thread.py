"""The transfer thread as the loop sees it. This one thread makes, uses and ends a worker's transport.

Only the loop gives commands, and it gets every answer by `call_soon_threadsafe`. Deadlines are timers on the loop, so they
hold also while the transport blocks in a copy. A deadline ends the wait for a read but not the read: its local blocks
belong to the transport until `BlockRead.stopped`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import Queue
from typing import Any, Final

from kvtransfer.api import LocalRegion, RemoteRegion, Transport
from kvtransfer.reads.block_read import BlockRead, mark_retrieved
from kvtransfer.reads.pace import Pace
from kvtransfer.reads.reactor import (
    Command,
    Connect,
    Connected,
    Disconnect,
    Event,
    Post,
    Reactor,
    ReadDone,
    ReadFailed,
    ReadId,
    Stop,
    SumBlocks,
)
from pdserve.config import LeaseConfig
from pdserve.core.errors import InternalBug, PdserveError, ReplicaLost, TransferFailed
from pdserve.core.ids import Incarnation

logger = logging.getLogger(__name__)

MAX_READS: Final = 1024  # most reads that have not stopped, over all peers; a full batch of sequences has 64 reads
START_TIMEOUT_S: Final = 60.0  # importing NIXL and registering a large pool takes seconds on a loaded machine
CONNECT_TIMEOUT_S: Final = 10.0


class TransferThread:
    """A worker's transfer thread. It is made, called and closed on one loop. `factory` makes the transport in the thread."""

    def __init__(
        self,
        factory: Callable[[], Transport],
        *,
        stuck_after_s: float = 120.0,
        max_reads: int = MAX_READS,
        sum_blocks: Mapping[LocalRegion, SumBlocks] | None = None,
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
        region: RemoteRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        deadline_s: float,
        into: LocalRegion,
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
        late = TransferFailed(f"a read of {len(local_blocks)} blocks from peer {peer:016x} took more than {deadline_s:.1f} s")
        stuck = f"a read from peer {peer:016x} has not stopped within {self._stuck_after_s:.0f} s"
        read.timers = [
            loop.call_later(deadline_s, read.fail, late),
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
        transport: Transport | None = None
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


def _close(transport: Transport | None) -> tuple[bool, BaseException | None]:
    """Close the transport. Return (True, None) when nothing can write into local memory any more, else (False, the error)."""
    try:
        if transport is not None:
            transport.close()
    except BaseException as exc:  # noqa: BLE001 - reported to the loop with the thread's end
        return False, exc
    return True, None
