"""The transport of another rank of this worker. Rank 0 tells that rank over a line what to read, and asks whether it is there.

The rank reads by a transport of its own into its own memory (`RankReads`). It works while rank 0 does other things, so all
ranks of a gang copy at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtransfer.api import Region, Transport, TransportRead
from kvtransfer.backends.registry import prepare
from pdserve.core.errors import TransferFailed
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.engine.gang.line import RankAnswer, RankLine


class _RemoteRead(TransportRead):
    """A read that a rank makes. `asked` is the last question about it: whether it is over."""

    __slots__ = ("asked",)

    def __init__(self, peer: Incarnation, num_blocks: int, asked: RankAnswer) -> None:
        super().__init__(peer, num_blocks)
        self.asked = asked


class RemoteTransport:
    """The transport of another rank. `kvtransfer.api.Transport` has the contract of each method.

    Each method raises `ReplicaLost` when the rank has ended, and those that wait for an answer when none comes in time. The
    gang is lost then.
    """

    def __init__(self, line: RankLine, regions: Sequence[Region], settings: TransportSettings) -> None:
        """Make the transport in the rank, over its regions. Raises what the rank raises."""
        self._line = line
        self._metadata: bytes = line.call("open", settings, tuple(regions))

    def metadata(self) -> bytes:
        """Return the metadata of the rank's transport."""
        return self._metadata

    def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        """Connect the rank to a peer's process."""
        self._line.call("connect", incarnation, metadata)

    def disconnect(self, incarnation: Incarnation) -> None:
        """Let the rank forget a peer's process."""
        self._line.call("disconnect", incarnation)

    def post_read(
        self,
        peer: Incarnation,
        region: Region,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        into: Region,
    ) -> TransportRead:
        """Ask the rank to post a read. `poll` tells whether it could."""
        asked = self._line.ask("post", peer, region, tuple(remote_blocks), tuple(local_blocks), into)
        return _RemoteRead(peer, len(local_blocks), asked)

    def poll(self, handle: TransportRead) -> bool:
        """Take the rank's answer if it is there. If the read is not over, ask again."""
        assert isinstance(handle, _RemoteRead)
        self._line.take()
        if not handle.asked.done:
            return False
        number, done = handle.asked.value
        if not done:
            handle.asked = self._line.ask("poll", number)
        return bool(done)

    def close(self) -> None:
        """Close the rank's transport."""
        self._line.call("close")


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """The settings by which a rank makes its transport, and the names under which peers know it."""

    transport: str
    host: str
    allow_public: bool
    worker_id: WorkerId
    rank_id: Incarnation


class RankReads:
    """The reads of a rank other than rank 0. It serves the line of a `RemoteTransport`, through all lives of the worker."""

    def __init__(self) -> None:
        self._transport: Transport[Region] | None = None
        self._reads: dict[int, TransportRead] = {}
        self._last = 0

    def open(self, settings: TransportSettings, regions: tuple[Region, ...]) -> bytes:
        """Make the transport of a life, and return its metadata."""
        make = prepare(settings.transport, settings.host, allow_public=settings.allow_public)
        self.close()
        self._transport = make(settings.worker_id, settings.rank_id, regions)
        return self._transport.metadata()

    def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        """Connect to a peer's process. Raises `TransferFailed`."""
        self._live().connect(incarnation, metadata)

    def disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer's process."""
        self._live().disconnect(incarnation)

    def post(
        self, peer: Incarnation, region: Region, remote: tuple[int, ...], local: tuple[int, ...], into: Region
    ) -> tuple[int, bool]:
        """Post a read. Return its number and whether it is over already. Raises `TransferFailed`."""
        self._last += 1
        self._reads[self._last] = self._live().post_read(peer, region, remote, local, into)
        return self.poll(self._last)

    def poll(self, number: int) -> tuple[int, bool]:
        """Return the number of a read and whether it is over. Raises `TransferFailed`; it is over then, or adrift."""
        read = self._reads.pop(number)
        done = self._live().poll(read)
        if not done:
            self._reads[number] = read
        return number, done

    def close(self) -> None:
        """Close the transport. Idempotent."""
        if self._transport is not None:
            self._transport.close()
        self._transport = None
        self._reads.clear()

    def _live(self) -> Transport[Region]:
        if self._transport is None:
            raise TransferFailed("the transport of this rank is closed")
        return self._transport
