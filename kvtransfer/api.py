"""The interface of a transport: one-sided reads of KV blocks from a peer's pool into ours, or into staging blocks.

A pool is one contiguous region of equal blocks for each KV group. Each region is registered once, and never deregistered or
moved while the process lives: peers keep our addresses, and an access through stale ones would succeed and corrupt. The same
holds for every other region into which reads write. A posted read cannot be taken back, so its local blocks belong to the
transport until `poll` says that the read is over.

The pool of a worker may lie in several processes: the ranks of a gang, each with some layers and heads of every block. A
`KvRegion` names them all. Workers read from one `KvRegion` into another; `kvtransfer.routed` makes reads between two processes
of it, which the backends do, from one `Region` into another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from pdserve.core.errors import TransferFailed
from pdserve.core.ids import Incarnation
from pdserve.core.kv_layout import KvGroup, KvShare, whole_share

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class TransferDevice:
    """The memory in which a region lies. `index` is the CUDA ordinal on the region's own machine; 0 for host memory."""

    kind: DeviceKind = "cpu"
    index: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """A contiguous region of `num_blocks` blocks of `block_bytes` bytes each in one process, which begins at `address`.

    pieces: the (offset, bytes) of each block that a read copies. Empty: it copies whole blocks.
    """

    address: int
    num_blocks: int
    block_bytes: int
    device: TransferDevice = TransferDevice()
    pieces: tuple[tuple[int, int], ...] = ()

    @property
    def whole(self) -> Region:
        """The same region of whole blocks."""
        return replace(self, pieces=()) if self.pieces else self

    @property
    def lengths(self) -> tuple[int, ...]:
        """The bytes of each piece of a block that a read copies."""
        return tuple(nbytes for _, nbytes in self.pieces) or (self.block_bytes,)

    @property
    def offsets(self) -> tuple[int, ...]:
        """The offset of each piece in its block."""
        return tuple(offset for offset, _ in self.pieces) or (0,)

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        return self.num_blocks * self.block_bytes

    def overlaps(self, other: Region) -> bool:
        """Tell whether the two regions share any byte."""
        same_memory = self.device == other.device
        return same_memory and self.address < other.address + other.nbytes and other.address < self.address + self.nbytes

    def address_of(self, block: int) -> int:
        """Return the address of a block. Raises `TransferFailed` for a block outside the region, since ids may come from
        another machine."""
        if not 0 <= block < self.num_blocks:
            raise TransferFailed(f"block {block} is outside a pool of {self.num_blocks}")
        return self.address + block * self.block_bytes


LocalRegion = Region
"""A KV group of this process's own pool, or staging blocks."""
RemoteRegion = Region
"""A KV group of a peer's pool, in the address space of the peer's process."""


@dataclass(frozen=True, slots=True)
class KvRegion:
    """The blocks of one KV group of a worker, in the processes that have them: each with a share of every block.

    parts: the share of each rank that has one, and the region of its parts of blocks. Together they have each head of each
    layer once (`cover`).
    """

    group: KvGroup
    parts: tuple[tuple[KvShare, Region], ...]

    @classmethod
    def of(cls, group: KvGroup, region: Region) -> KvRegion:
        """Return the region of a worker of one process."""
        return cls(group, ((whole_share(group), region),))

    @property
    def num_blocks(self) -> int:
        """The number of blocks."""
        return self.parts[0][1].num_blocks

    @property
    def block_bytes(self) -> int:
        """The bytes of a block in all processes together."""
        return self.group.block_bytes


AnyRegion = Region | KvRegion
"""What a transport of either kind reads from, or into."""


class ReadAdrift(TransferFailed):
    """A read failed, and nobody knows whether it may still write into local memory.

    Its local blocks must stay out of use until the transport is closed.
    """


class TransportRead:
    """One posted read. Transports subclass it; callers only pass it to `poll`."""

    __slots__ = ("num_blocks", "peer")

    def __init__(self, peer: Incarnation, num_blocks: int) -> None:
        self.peer = peer
        self.num_blocks = num_blocks


R_contra = TypeVar("R_contra", contravariant=True)


class Transport(Protocol[R_contra]):
    """The transport of one process (`Region`), or of a worker (`KvRegion`). It is synchronous; one thread makes it and is the
    only one to use it.

    A call may block for as long as a copy takes. `TransferFailed`, but not its subclass `ReadAdrift`, means that the read
    will never touch local memory again.
    """

    def metadata(self) -> bytes:
        """Return the opaque bytes that a peer needs to `connect` to us: a few hundred, constant for the transport's life."""
        ...

    def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        """Connect to a peer. Do nothing if it is connected; make the connection anew if it broke.

        Raises `TransferFailed` when the peer cannot be reached, or when a read of the broken connection is not over.
        """
        ...

    def disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer, which must have no read in flight. Do nothing for an unknown peer."""
        ...

    def post_read(
        self,
        peer: Incarnation,
        region: R_contra,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        into: R_contra,
    ) -> TransportRead:
        """Start to copy remote_blocks[i] of `region` into local_blocks[i] of `into`.

        `into` is a region of our pool, or another region of ours. Another one is registered at its first use, peers do not
        learn of it, and it must stay where it is until `close`.

        Raises `TransferFailed` when the peer is gone or unknown, the regions' shapes differ or an id is out of range.
        """
        ...

    def poll(self, handle: TransportRead) -> bool:
        """Return True once every block has arrived. Raises `TransferFailed` when the peer is gone. Do not call it again after
        either."""
        ...

    def close(self) -> None:
        """Drop every connection. No read writes into local memory after this returns. Idempotent."""
        ...


def check_shapes(local: LocalRegion, remote: RemoteRegion, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> None:
    """Check that the blocks exist on both sides, pair up and have equal pieces. Raises `TransferFailed` if not."""
    if remote.lengths != local.lengths:
        theirs, ours = (f"{sum(side.lengths)} bytes in {len(side.lengths)} pieces" for side in (remote, local))
        raise TransferFailed(f"the peer's blocks have {theirs}, ours {ours}")
    if len(remote_blocks) != len(local_blocks) or not remote_blocks:
        raise TransferFailed(f"{len(remote_blocks)} remote blocks cannot be read into {len(local_blocks)} local ones")
    for region, blocks in ((remote, remote_blocks), (local, local_blocks)):
        if any(offset < 0 or offset + nbytes > region.block_bytes for offset, nbytes in region.pieces):
            raise TransferFailed(f"a piece of a block is outside its {region.block_bytes} bytes")
        if min(blocks) < 0 or max(blocks) >= region.num_blocks:
            raise TransferFailed(f"block ids {min(blocks)}..{max(blocks)} are outside a pool of {region.num_blocks}")
