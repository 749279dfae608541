"""The transport of a worker, whose pool and whose peers' pools may lie in several processes, the ranks of gangs.

A read of blocks is a read between two processes for each pair of ranks whose shares of a block overlap: a `Route`
(`pdserve.core.kv_layout`). Workers of one process have one route, of whole blocks. Ranks of equal degrees have one route each,
also of whole blocks. Other pairs read pieces.

A peer's rank is known to backends by an id of its own (`rank_id`), so a backend sees processes and nothing of gangs.

The read of a worker is over when all of its routes are. One route that fails makes it fail, but not before the others have
stopped, because they still write into our blocks. A route that is adrift makes the whole read adrift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Final, NamedTuple, cast

import msgpack

from kvtransfer.api import KvRegion, ReadAdrift, Region, Transport, TransportRead
from pdserve.core.errors import TransferFailed
from pdserve.core.ids import Incarnation
from pdserve.core.kv_layout import MAX_KV_GROUPS, join
from pdserve.core.shards import MOST_RANKS

MAX_METADATA_BYTES: Final = MOST_RANKS << 16
"""A rank's metadata has at most 64 KiB, and usually half a KiB."""


def rank_id(incarnation: Incarnation, rank: int) -> Incarnation:
    """Return the id by which backends know one rank of a worker's incarnation. Rank 0 has that of the incarnation."""
    if rank == 0:
        return incarnation
    digest = blake2b(b"%016x rank %d" % (incarnation, rank), digest_size=8).digest()
    return Incarnation(int.from_bytes(digest, "little"))


class RoutedRead(TransportRead):
    """A read of a worker, and the reads between two processes that it consists of. It is pure."""

    __slots__ = ("adrift", "error", "routes")

    def __init__(self, peer: Incarnation, num_blocks: int) -> None:
        super().__init__(peer, num_blocks)
        self.routes: list[tuple[Transport[Region], TransportRead]] = []
        """The reads that are not over."""
        self.error: TransferFailed | None = None
        """The first failure."""
        self.adrift = False

    def failed(self, error: TransferFailed) -> None:
        """Note that one of the reads is over and has failed, or is adrift."""
        self.error = self.error or error
        self.adrift |= isinstance(error, ReadAdrift)

    def is_done(self) -> bool:
        """Tell whether every byte has arrived. Raises the first failure once nothing writes any more, or as adrift."""
        if self.routes:
            return False
        if self.error is None:
            return True
        if self.adrift and not isinstance(self.error, ReadAdrift):
            raise ReadAdrift(self.error.message)
        raise self.error


class _Route(NamedTuple):
    """A route with the transport of our rank, the id of the peer's rank, and their regions."""

    transport: Transport[Region]
    peer: Incarnation
    theirs: Region
    ours: Region


@dataclass(slots=True)
class _Peer:
    """A peer: the numbers of its ranks, whether all of them are connected, and the routes between its regions and ours."""

    ranks: frozenset[int]
    connected: bool = False
    routes: dict[tuple[KvRegion, KvRegion], tuple[_Route, ...]] = field(default_factory=dict)


class RoutedTransport:
    """The transports of all ranks of this worker as one. `kvtransfer.api.Transport` has the contract of each method."""

    def __init__(self, ranks: Mapping[int, Transport[Region]]) -> None:
        """Join the transport of each rank of this worker that stores KV, by its number. A worker of one process has rank 0."""
        self._ranks = dict(ranks)
        self._peers: dict[Incarnation, _Peer] = {}
        self._metadata = pack_metadata({rank: transport.metadata() for rank, transport in self._ranks.items()})

    def metadata(self) -> bytes:
        """Return the metadata of each rank, as (rank, bytes) in msgpack."""
        return self._metadata

    def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        """Connect each rank of ours to each rank of a peer. Raises `TransferFailed` when one of them cannot."""
        ranks = _unpack(incarnation, metadata)
        peer = self._peers.get(incarnation)
        if peer is None or peer.ranks != ranks.keys():
            self.disconnect(incarnation)
            peer = self._peers[incarnation] = _Peer(frozenset(ranks))
        peer.connected = False
        for transport in self._ranks.values():
            for rank, of_rank in ranks.items():
                transport.connect(rank_id(incarnation, rank), of_rank)
        peer.connected = True

    def disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer with all its ranks, also one that is connected in part."""
        peer = self._peers.pop(incarnation, None)
        for rank in peer.ranks if peer is not None else ():
            for transport in self._ranks.values():
                transport.disconnect(rank_id(incarnation, rank))

    def post_read(
        self,
        peer: Incarnation,
        region: KvRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        into: KvRegion,
    ) -> TransportRead:
        """Post a read for each route. Once one of them is posted, the failure of another is told by `poll`."""
        read = RoutedRead(peer, len(local_blocks))
        for route in self._routes(peer, region, into):
            try:
                posted = route.transport.post_read(route.peer, route.theirs, remote_blocks, local_blocks, route.ours)
            except TransferFailed as exc:
                read.failed(exc)
                break
            read.routes.append((route.transport, posted))
        if not read.routes:
            read.is_done()
        return read

    def poll(self, handle: TransportRead) -> bool:
        """Poll each read that is not over. Return True when all have arrived."""
        assert isinstance(handle, RoutedRead)
        going = []
        for transport, read in handle.routes:
            try:
                if not transport.poll(read):
                    going.append((transport, read))
            except TransferFailed as exc:
                handle.failed(exc)
        handle.routes = going
        return handle.is_done()

    def close(self) -> None:
        """Close the transports of all ranks. Raises an error of one of them, after all were told to close."""
        self._peers.clear()
        with ExitStack() as stack:
            for transport in self._ranks.values():
                stack.callback(transport.close)

    def _routes(self, peer: Incarnation, region: KvRegion, into: KvRegion) -> tuple[_Route, ...]:
        """Return the routes between two regions. Raises `TransferFailed`."""
        known = self._peers.get(peer)
        if known is None or not known.connected:
            raise TransferFailed(f"peer {peer:016x} is not connected")
        routes = known.routes.get((region, into))
        if routes is None:
            if region.group != into.group:
                raise TransferFailed(f"the peer's blocks are {region.group}, ours {into.group}")
            if strange := {share.rank for share, _ in region.parts} - known.ranks:
                raise TransferFailed(f"peer {peer:016x} has KV in ranks {sorted(strange)}, which are not connected")
            if len(known.routes) >= 2 * MAX_KV_GROUPS:  # it names other regions than it did, which backends refuse
                known.routes.clear()
            routes = known.routes[region, into] = tuple(self._joined(peer, region, into))
        return routes

    def _joined(self, peer: Incarnation, region: KvRegion, into: KvRegion) -> list[_Route]:
        theirs, ours = ({share.rank: memory for share, memory in one.parts} for one in (region, into))
        routes = []
        shares = [[share for share, _ in one.parts] for one in (region, into)]
        for their, our, pieces in join(region.group, *shares):
            remote, local = theirs[their.rank], ours[our.rank]
            if len(pieces) > 1 or not remote.block_bytes == local.block_bytes == pieces[0].nbytes:
                remote = replace(remote, pieces=tuple((piece.theirs, piece.nbytes) for piece in pieces))
                local = replace(local, pieces=tuple((piece.ours, piece.nbytes) for piece in pieces))
            routes.append(_Route(self._ranks[our.rank], rank_id(peer, their.rank), remote, local))
        # Our own rank copies while it posts, so the other ranks are asked first.
        return routes[::-1]


def pack_metadata(ranks: Mapping[int, bytes]) -> bytes:
    """Return the metadata of a worker from those of its ranks."""
    return cast(bytes, msgpack.packb(list(ranks.items())))


def _unpack(incarnation: Incarnation, metadata: bytes) -> dict[int, bytes]:
    """Read the metadata of a peer's ranks. Raises `TransferFailed`."""
    fields: object = None
    try:
        fields = msgpack.unpackb(metadata[: MAX_METADATA_BYTES + 1], use_list=False)
    except (ValueError, msgpack.exceptions.UnpackException):
        pass
    pairs = fields if isinstance(fields, tuple) and 1 <= len(fields) <= MOST_RANKS else (None,)
    if not all(map(_is_of_rank, pairs)) or len(dict(cast("tuple[tuple[int, bytes]]", pairs))) < len(pairs):
        raise TransferFailed(f"the {len(metadata)} bytes of metadata of peer {incarnation:016x} are not those of 1 to 64 ranks")
    return dict(cast("tuple[tuple[int, bytes]]", pairs))


def _is_of_rank(pair: object) -> bool:
    right = isinstance(pair, tuple) and tuple(map(type, pair)) == (int, bytes)
    return right and 0 <= cast("tuple[int, bytes]", pair)[0] < MOST_RANKS
