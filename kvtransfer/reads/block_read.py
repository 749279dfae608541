"""One read of KV blocks, as the loop sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvtransfer.api import RemoteRegion
from pdserve.config import LeaseConfig
from pdserve.core.errors import PdserveError
from pdserve.core.ids import BlockSum, Incarnation


@dataclass(frozen=True, slots=True)
class ReadResult:
    """`duration_s`: from being posted to the arrival of the last byte. `sums`: checksums of the blocks as they
    came, in order; empty where nobody sums."""

    nbytes: int
    duration_s: float
    sums: tuple[BlockSum, ...] = ()


class BlockRead:
    """Two answers that come apart: `result` is what the asker waits for, `stopped` is when its blocks are its own again.

    Only whoever posts reads, `BlockSource`, calls the methods; the asker may call `give_up`.
    """

    def __init__(self, peer: Incarnation, nbytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.peer = peer
        self.nbytes = nbytes
        self.result: asyncio.Future[ReadResult] = loop.create_future()
        """Raises `TransferFailed` on failure or past the deadline, `ReplicaLost` when the thread died."""
        self.result.add_done_callback(mark_retrieved)
        self.timers: list[asyncio.TimerHandle] = []
        self._stopped: asyncio.Future[None] = loop.create_future()

    @property
    def stopped(self) -> asyncio.Future[None]:
        """Done when the transport will never touch the local blocks again. A view: cancelling it changes nothing."""
        return asyncio.shield(self._stopped)

    @property
    def is_stopped(self) -> bool:
        return self._stopped.done()

    def give_up(self) -> None:
        """Nobody waits for the result any more. What was posted goes on; what was not need not be. Idempotent."""
        self.result.cancel()

    def succeed(self, duration_s: float, sums: tuple[BlockSum, ...] = ()) -> None:
        if not self.result.done():
            self.result.set_result(ReadResult(self.nbytes, duration_s, sums))

    def fail(self, error: PdserveError) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    def mark_stopped(self) -> None:
        for timer in self.timers:
            timer.cancel()
        if not self._stopped.done():
            self._stopped.set_result(None)


class BlockSource(Protocol):
    """Who copies a peer's blocks into ours, as a pull sees it: the `TransferThread`, or those of `Staging` where the peer
    stores KV in another dtype."""

    def read(
        self,
        peer: Incarnation,
        region: RemoteRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        *,
        deadline_s: float,
    ) -> BlockRead:
        """See `TransferThread.read`. What it raises means that nothing was posted."""
        ...

    def deadline_s(self, peer: Incarnation, nbytes: int, config: LeaseConfig) -> float:
        """How long a read of `nbytes` that is asked for now may take, counting what is under way before it."""
        ...


def mark_retrieved(future: asyncio.Future[Any]) -> None:
    """An asker that has left is no reason for asyncio to complain of an error that nobody fetched."""
    if not future.cancelled():
        future.exception()
