"""One read of KV blocks, as the loop sees it, and the interface of its sources."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtransfer.api import LocalRegion, RemoteRegion
from pdserve.config import LeaseConfig
from pdserve.core.errors import PdserveError
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
        region: RemoteRegion,
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


class PoolReads(Protocol):
    """The part of the `TransferThread` that reads into any region of ours."""

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
        """Start a read into `into`. See `TransferThread.read`."""
        ...

    def deadline_s(self, peer: Incarnation, nbytes: int, config: LeaseConfig) -> float:
        """Return the seconds that a read may take. See `TransferThread.deadline_s`."""
        ...


@dataclass(frozen=True, slots=True)
class PoolSource:
    """The source that reads straight into one KV group of our pool."""

    transfer: PoolReads
    region: LocalRegion

    def read(
        self,
        peer: Incarnation,
        region: RemoteRegion,
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
