"""An in-memory transport for tests: it copies real bytes between pools of one process, and fails on demand.

`FakeFabric` stands for the network; transports that share one can reach each other. A held read copies only when it is
resumed, like the late data of a real transport. So a caller that frees blocks too early corrupts them here as well.

By its name `fake` in the configuration, it joins the workers of one process. Workers in processes of their own cannot reach
each other with it, and say so when they connect.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Final

from kvtransfer.api import LocalRegion, ReadAdrift, RemoteRegion, TransportRead, check_shapes
from pdserve.core.errors import ConfigError, TransferFailed
from pdserve.core.ids import Incarnation, WorkerId

_METADATA_PREFIX = b"fake:"


class FakeFabric:
    """The network of fake transports: the pools that can be reached, by incarnation, and the faults of the next reads.

    A test's thread sets the members, and transfer threads read them, so single operations replace or change each member.
    """

    def __init__(self) -> None:
        self._regions: dict[Incarnation, tuple[LocalRegion, ...]] = {}
        self._held: set[Incarnation] = set()
        self._adrift: set[Incarnation] = set()
        self.polls_until_done = 0  # a read takes so many polls; 0: it is done when posted

    def attach(self, incarnation: Incarnation, regions: Sequence[LocalRegion]) -> None:
        """Let peers read this pool."""
        self._regions[incarnation] = tuple(regions)

    def kill(self, incarnation: Incarnation) -> None:
        """Remove a peer. Reads of it fail, also those in flight."""
        self._regions.pop(incarnation, None)

    def hold(self, incarnation: Incarnation) -> None:
        """Stop the progress of reads of this peer until `resume`."""
        self._held.add(incarnation)

    def resume(self, incarnation: Incarnation) -> None:
        """Let held reads of this peer go on."""
        self._held.discard(incarnation)

    def set_adrift(self, incarnation: Incarnation) -> None:
        """Make the next reads of this peer fail with `ReadAdrift`."""
        self._adrift.add(incarnation)

    def regions_of(self, incarnation: Incarnation) -> tuple[LocalRegion, ...] | None:
        """Return the regions of a peer's pool. None: the peer is unknown or was killed."""
        return self._regions.get(incarnation)

    def is_held(self, incarnation: Incarnation) -> bool:
        """Tell whether reads of this peer make no progress."""
        return incarnation in self._held

    def is_adrift(self, incarnation: Incarnation) -> bool:
        """Tell whether reads of this peer fail with `ReadAdrift`."""
        return incarnation in self._adrift


class _FakeRead(TransportRead):
    __slots__ = ("done", "into", "local_blocks", "polls_left", "region", "remote_blocks")

    def __init__(
        self,
        peer: Incarnation,
        region: RemoteRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        into: LocalRegion,
        polls_left: int,
    ) -> None:
        super().__init__(peer, len(local_blocks))
        self.region = region
        self.into = into
        self.remote_blocks = tuple(remote_blocks)
        self.local_blocks = tuple(local_blocks)
        self.polls_left = polls_left
        self.done = False


class FakeTransport:
    """A transport over a `FakeFabric`, for host memory only. `kvtransfer.api.Transport` has the contract of each method."""

    def __init__(self, fabric: FakeFabric, incarnation: Incarnation, regions: Sequence[LocalRegion]) -> None:
        assert all(region.device.kind == "cpu" for region in regions)
        self._fabric = fabric
        self._incarnation = incarnation
        self._peers: set[Incarnation] = set()
        self._closed = False
        fabric.attach(incarnation, regions)

    def metadata(self) -> bytes:
        """Return a text that names the incarnation."""
        return _METADATA_PREFIX + b"%016x" % self._incarnation

    def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        """Connect to a peer on the fabric. Raises `TransferFailed` for unknown ones and for wrong metadata."""
        if metadata != _METADATA_PREFIX + b"%016x" % incarnation:
            raise TransferFailed(f"the metadata of peer {incarnation:016x} names another agent")
        if self._fabric.regions_of(incarnation) is None:
            raise TransferFailed(
                f"cannot connect to peer {incarnation:016x}: transport fake reaches only pools of its own process"
            )
        self._peers.add(incarnation)

    def disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer."""
        self._peers.discard(incarnation)

    def post_read(
        self,
        peer: Incarnation,
        region: RemoteRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        into: LocalRegion,
    ) -> TransportRead:
        """Start a read, and copy at once unless the fabric holds or delays it."""
        if peer not in self._peers:
            raise TransferFailed(f"peer {peer:016x} is not connected")
        check_shapes(into, region, remote_blocks, local_blocks)
        if region.whole not in self._reachable(peer):
            raise TransferFailed(f"the pool {region.whole} is not peer {peer:016x}'s")
        if self._fabric.is_adrift(peer):
            raise ReadAdrift(f"a read of {len(local_blocks)} blocks from peer {peer:016x} failed")
        read = _FakeRead(peer, region, remote_blocks, local_blocks, into, self._fabric.polls_until_done)
        if read.polls_left == 0 and not self._fabric.is_held(peer):
            self._copy(read)
        return read

    def poll(self, handle: TransportRead) -> bool:
        """Count one poll, and copy when the read has had all its polls. Return whether it is done."""
        assert isinstance(handle, _FakeRead)
        if not handle.done:
            self._reachable(handle.peer)
            if self._fabric.is_held(handle.peer):
                return False
            handle.polls_left -= 1
            if handle.polls_left < 0:
                self._copy(handle)
        return handle.done

    def close(self) -> None:
        """Leave the fabric, so that reads of this pool fail."""
        self._closed = True
        self._fabric.kill(self._incarnation)

    def _reachable(self, peer: Incarnation) -> tuple[RemoteRegion, ...]:
        regions = self._fabric.regions_of(peer)
        if regions is None:
            self._peers.discard(peer)
            raise TransferFailed(f"peer {peer:016x} disconnected during a read")
        return regions

    def _copy(self, read: _FakeRead) -> None:
        assert not self._closed
        self._reachable(read.peer)
        runs = list(zip(read.into.offsets, read.region.offsets, read.into.lengths, strict=True))
        for remote, local in zip(read.remote_blocks, read.local_blocks, strict=True):
            theirs, ours = read.region.address_of(remote), read.into.address_of(local)
            for to, at, nbytes in runs:
                ctypes.memmove(ours + to, theirs + at, nbytes)
        read.done = True


FABRIC: Final = FakeFabric()
"""The fabric of all transports of this process that the configuration names."""


def prepare(host: str, allow_public: bool) -> Callable[[WorkerId, Incarnation, Sequence[LocalRegion]], FakeTransport]:
    """Return the function that makes a transport over `FABRIC`. The transport opens nothing to the network, so it takes any
    `host`."""
    return _make


def _make(worker_id: WorkerId, incarnation: Incarnation, regions: Sequence[LocalRegion]) -> FakeTransport:
    """Make the transport of one worker. Raises `ConfigError` for a pool in GPU memory."""
    if any(region.device.kind != "cpu" for region in regions):
        raise ConfigError(f"transfer.transport fake copies host memory only, and the KV of {worker_id} is on a GPU: use nixl")
    return FakeTransport(FABRIC, incarnation, regions)
