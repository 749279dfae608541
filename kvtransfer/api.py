"""What a transport is: one-sided reads of whole KV blocks from a peer's pool into ours, or into staging blocks.

A pool is one contiguous region of equal blocks, registered once and never deregistered or moved while the process
lives: peers keep our addresses, and a write through stale ones would succeed and corrupt. So does every other region
that is read into. A posted read cannot be taken back, so its local blocks belong to the transport until `poll` says
that it is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from pdserve.core.errors import TransferFailed
from pdserve.core.ids import Incarnation

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Device:
    """Where a region lies. `index` is the CUDA ordinal on its own machine; 0 for host memory."""

    kind: DeviceKind = "cpu"
    index: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """`num_blocks` blocks of `block_bytes`, back to back from `address`."""

    address: int
    num_blocks: int
    block_bytes: int
    device: Device = Device()

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def address_of(self, block: int) -> int:
        """Raises `TransferFailed` for a block outside the region: ids may come from another machine."""
        if not 0 <= block < self.num_blocks:
            raise TransferFailed(f"block {block} is outside a pool of {self.num_blocks}")
        return self.address + block * self.block_bytes


LocalRegion = Region
"""This worker's own pool, or its staging blocks."""
RemoteRegion = Region
"""A peer's pool, in the peer's address space."""


class ReadAdrift(TransferFailed):
    """A read failed in a way that does not say whether it may still write into local memory.

    Its blocks must stay out of use until the transport is closed.
    """


class TransportRead:
    """One posted read. Transports subclass it; callers only hand it back to `poll`."""

    __slots__ = ("num_blocks", "peer")

    def __init__(self, peer: Incarnation, num_blocks: int) -> None:
        self.peer = peer
        self.num_blocks = num_blocks


class Transport(Protocol):
    """Synchronous, made and used by one thread only.

    A call may block for as long as a copy takes. `TransferFailed` (but not its subclass `ReadAdrift`) means that
    the read will never touch local memory again.
    """

    def metadata(self) -> bytes:
        """What a peer needs to `connect` to us: opaque, a few hundred bytes, constant for the life of the transport."""
        ...

    def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        """Learn a peer. Does nothing for one that is connected; reconnects one whose connection broke.

        Raises `TransferFailed` when it cannot be reached, or when a read of the broken connection is not over.
        """
        ...

    def disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer that has no read in flight. Does nothing for an unknown one."""
        ...

    def post_read(
        self,
        peer: Incarnation,
        region: RemoteRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        into: LocalRegion | None = None,
    ) -> TransportRead:
        """Start copying remote_blocks[i] of `region` into local_blocks[i] of our pool.

        `into`: of that region of ours instead. It is registered when first named, peers do not learn of it, and it must
        stay where it is until `close`.

        Raises `TransferFailed` when the peer is gone or unknown, the regions' shapes differ or an id is out of range.
        """
        ...

    def poll(self, handle: TransportRead) -> bool:
        """True once every block has arrived. Raises `TransferFailed` when the peer is gone. Not to be called again after."""
        ...

    def close(self) -> None:
        """Drop every connection; no read writes into local memory after this returns. Idempotent."""
        ...


def check_shapes(local: LocalRegion, remote: RemoteRegion, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> None:
    """Raises `TransferFailed` unless the blocks exist on both sides, pair up and have equal sizes."""
    if remote.block_bytes != local.block_bytes:
        raise TransferFailed(f"the peer's blocks have {remote.block_bytes} bytes, ours {local.block_bytes}")
    if len(remote_blocks) != len(local_blocks) or not remote_blocks:
        raise TransferFailed(f"{len(remote_blocks)} remote blocks cannot be read into {len(local_blocks)} local ones")
    for region, blocks in ((remote, remote_blocks), (local, local_blocks)):
        if min(blocks) < 0 or max(blocks) >= region.num_blocks:
            raise TransferFailed(f"block ids {min(blocks)}..{max(blocks)} are outside a pool of {region.num_blocks}")
