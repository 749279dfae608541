"""The ticket: with it a decode worker finds, checks and reads leased blocks.

The prefill worker writes it, the router carries it as opaque bytes, and only this file reads it. No field is trusted: each
one is checked for type and range before use. A bad ticket is refused as `TransferFailed` (garbage) or `IncompatiblePeer` (a
worker of another version or layout).

A ticket belongs to one lease and one prompt. Before decode reads a byte, it compares the prompt's hash with that of the
prompt that it has to serve. Only the lender can tell that a ticket is the unchanged one that it wrote for the lease:

    lender   mac   = MAC(secret of this incarnation, every other field)       written into the ticket
    reader   proof = MAC(mac, every other field as it came)                  shown with each call on the lease

The lender knows which proof a lease expects. A forged ticket has no right MAC, a ticket of another lease has another MAC,
and a changed ticket gives another proof with the right MAC.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, Final, Self, cast

import msgpack

from kvtransfer.api import DeviceKind, KvRegion, Region, TransferDevice
from pdserve.core.block_hash import PROMPT_HASH_BYTES
from pdserve.core.errors import ConfigError, IncompatiblePeer, LeaseGone, TransferFailed
from pdserve.core.ids import NULL_BLOCK, BlockId, Incarnation, LeaseId
from pdserve.core.kv_layout import DTYPE_BITS, MAX_KV_GROUPS, KvGroup, KvShare, KvSpec, cover
from pdserve.core.shards import MOST_RANKS

VERSION: Final = 4
MAC_BYTES: Final = 32
"""The bytes of a MAC: as many as a hash has for which nobody can find a second text."""
MAX_TICKET_BYTES: Final = 1 << 20  # 200,000 blocks of 5 bytes: a prompt of three million tokens
_MAX_ADDRESS_CHARS: Final = 256
_MAX_DIMENSION: Final = 1 << 20
_MAX_U64: Final = (1 << 64) - 1
_MAX_LAYERS: Final = 4096
_MAX_PLANES: Final = 8
_NUM_FIELDS: Final = 10
ENGINE_VERSION: Final = 1001
"""The version of an `EngineTicket`. A reader that copies blocks by itself refuses it, and the other way round."""
_NUM_ENGINE_FIELDS: Final = 9
MAX_PARAMS_BYTES: Final = 1 << 19
"""The most bytes of the engines' own ticket in an `EngineTicket`."""


class InvalidTicket(TransferFailed):
    """The bytes are not a ticket, or their fields contradict each other."""


class WrongTicket(LeaseGone):
    """The ticket belongs to another request or lease. The two workers are not to blame; the request is done again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTicket(ABC):
    """The part of a ticket by which a reader finds the lease, and the lender knows its reader.

    `peer_address` is host:port of the lender's Peer and Lease services. The prompt has `prompt_len` tokens, and `prompt_hash`
    covers the whole prompt and its salt.
    """

    incarnation: Incarnation
    lease_counter: int
    peer_address: str
    prompt_len: int
    prompt_hash: bytes
    mac: bytes = bytes(MAC_BYTES)

    @property
    def lease_id(self) -> LeaseId:
        """The id of the lease."""
        return LeaseId(self.incarnation, self.lease_counter)

    @property
    def proof(self) -> bytes:
        """The proof that the reader shows to the lender with each call, and that the lender expects."""
        return _mac(self.mac, self._content())

    def with_mac(self, secret: bytes) -> Self:
        """Return the ticket with its MAC, as the lender hands it out. `secret` is the lender's own, at most 64 bytes, and new
        at every process start."""
        return replace(self, mac=_mac(secret, self._content()))

    def check_request(self, lease_id: LeaseId, prompt_hash: bytes) -> None:
        """Check that the ticket belongs to this lease, and to this prompt with its salt. Raises `WrongTicket` if not."""
        if self.lease_id != lease_id:
            raise WrongTicket(f"the ticket is of lease {self.lease_id}, not of {lease_id}")
        if not compare_digest(self.prompt_hash, prompt_hash):
            raise WrongTicket(f"the ticket of lease {lease_id} is over another prompt, or another cache_salt")

    def encode(self) -> bytes:
        """Return the bytes of the ticket (msgpack), at most `MAX_TICKET_BYTES`."""
        data = cast(bytes, msgpack.packb((*self._fields(), self.mac)))
        assert len(data) <= MAX_TICKET_BYTES
        return data

    def _content(self) -> bytes:
        return cast(bytes, msgpack.packb(self._fields()))

    @abstractmethod
    def _fields(self) -> tuple[Any, ...]:
        """Return all fields except the MAC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket(LeaseTicket):
    """The ticket of a lease over blocks of the lender's pool, which the reader copies.

    `regions` describe the lender's pool, one for each group of `kv_spec`, with the memory of each rank that has a share of its
    blocks. block_tables[g][i] holds the KV of group g for tokens
    [i * block_size, (i + 1) * block_size) of the prompt. Blocks that are dead at the end of the prompt are null, and the bytes
    of a ticket do not list them. `checksums` True: the lender sums its blocks, and compares its checksums with the reader's.
    """

    kv_spec: KvSpec
    regions: tuple[KvRegion, ...]
    block_tables: tuple[tuple[BlockId, ...], ...]
    checksums: bool
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.prompt_len < 1:
            raise InvalidTicket(f"a prompt of {self.prompt_len} tokens has no blocks to read")
        if not len(self.regions) == len(self.block_tables) == len(self.kv_spec.groups):
            raise InvalidTicket(f"{len(self.regions)} regions and {len(self.block_tables)} tables, {self.kv_spec.groups}")
        for group, region, table in zip(self.kv_spec.groups, self.regions, self.block_tables, strict=True):
            self._check_blocks(group, region, table)

    def _check_blocks(self, group: KvGroup, region: KvRegion, table: tuple[BlockId, ...]) -> None:
        """Check the blocks of one group. Raises `InvalidTicket`."""
        dead = group.first_live(self.prompt_len)
        live = table[dead:]
        if len(table) != group.blocks_for(self.prompt_len) or table[:dead] != (NULL_BLOCK,) * dead:
            raise InvalidTicket(
                f"{len(table)} blocks of {group.block_size}, with {table.count(NULL_BLOCK)} null ones, cannot hold "
                f"{self.prompt_len} tokens with {dead} blocks behind the window of {group.window}"
            )
        if live and not 0 <= min(live) <= max(live) < region.num_blocks:
            raise InvalidTicket(f"blocks {min(live)} to {max(live)} are outside a pool of {region.num_blocks}")
        if len(set(live)) != len(live):
            raise InvalidTicket("a block is listed twice")
        _check_parts(group, region)

    def check_checksums(self, ours: bool) -> None:
        """Check that both workers use checksums, or neither. Raises `IncompatiblePeer` if not: one side would then sum its
        blocks with nothing to compare."""
        if self.checksums != ours:
            on, off = (self.peer_address, "this worker") if self.checksums else ("this worker", self.peer_address)
            raise IncompatiblePeer(f"lease.kv_checksum is on at {on} and off at {off}: set it alike for both pools")

    @property
    def num_blocks(self) -> int:
        """The number of blocks of the prompt in each group, dead ones included."""
        return len(self.block_tables[0])

    @property
    def kv_bytes(self) -> int:
        """The bytes of all leased blocks."""
        return self.bytes_from(0)

    def bytes_from(self, first: int, end: int | None = None) -> int:
        """Return the bytes of the blocks at positions [first, end) of all groups, dead ones left out. None: to the last one."""
        parts = [table[first:end] for table in self.block_tables]
        counts = [len(part) - part.count(NULL_BLOCK) for part in parts]
        return sum([count * group.block_bytes for count, group in zip(counts, self.kv_spec.groups, strict=True)])

    def check_layout(self, local: KvSpec) -> None:
        """Check that our pool can hold the leased KV. Only dtypes may differ: `kvtransfer.staging` then converts.

        Raises `IncompatiblePeer`, which names both layouts: such a pair must never be tried again.
        """
        if not self.kv_spec.holds_the_same_as(local):
            raise IncompatiblePeer(f"KV layouts differ: {self.peer_address} writes {self.kv_spec}, this worker reads {local}")

    def _fields(self) -> tuple[Any, ...]:
        return (
            self.version,
            self.incarnation,
            self.lease_counter,
            self.peer_address,
            self.kv_spec.block_size,
            tuple(map(_group_fields, self.kv_spec.groups, self.regions, self.block_tables)),
            self.prompt_len,
            self.prompt_hash,
            self.checksums,
        )

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """Read a ticket. Raises `IncompatiblePeer` for another version or an unknown dtype, and `InvalidTicket` for every other
        fault."""
        fields = _unpack(data)
        _check_version(fields, VERSION, _NUM_FIELDS)
        _, incarnation, lease, peer_address, block_size, groups, prompt_len, prompt_hash, checksums, mac = fields
        spec, regions, lists = _groups(groups, _integer("block_size", block_size, 1, _MAX_DIMENSION))
        tokens = _integer("prompt_len", prompt_len, 1, (1 << 31) - 1)
        tables = tuple([_with_dead(live, group, tokens) for live, group in zip(lists, spec.groups, strict=True)])
        return cls(
            incarnation=Incarnation(_integer("incarnation", incarnation, 0, _MAX_U64)),
            lease_counter=_integer("lease_counter", lease, 1, _MAX_U64),
            peer_address=_address(peer_address),
            kv_spec=spec,
            regions=regions,
            block_tables=tables,
            prompt_len=tokens,
            prompt_hash=_bytes("prompt_hash", prompt_hash, PROMPT_HASH_BYTES),
            checksums=_flag("checksums", checksums),
            mac=_bytes("mac", mac, MAC_BYTES),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTicket(LeaseTicket):
    """The ticket of a lease over KV that the engine of the lender hands to the engine of the reader by itself.

    The lease wraps what the two engines believe: `params` is the engines' own ticket (JSON), which the reader gives to its
    engine once the lender has said OK, and never otherwise. It stands for `num_blocks` blocks. Empty: there is no KV to hand
    over, because token 0 ends the request.
    """

    num_blocks: int
    params: bytes

    def _fields(self) -> tuple[Any, ...]:
        return (
            ENGINE_VERSION,
            self.incarnation,
            self.lease_counter,
            self.peer_address,
            self.prompt_len,
            self.prompt_hash,
            self.num_blocks,
            self.params,
        )

    @classmethod
    def decode(cls, data: bytes) -> EngineTicket:
        """Read a ticket. Raises `IncompatiblePeer` for another version, and `InvalidTicket` for every other fault."""
        fields = _unpack(data)
        _check_version(fields, ENGINE_VERSION, _NUM_ENGINE_FIELDS)
        _, incarnation, lease, peer_address, prompt_len, prompt_hash, num_blocks, params, mac = fields
        if not isinstance(params, bytes) or len(params) > MAX_PARAMS_BYTES:
            raise InvalidTicket(f"params must be at most {MAX_PARAMS_BYTES} bytes, got {params!r:.40}")
        return cls(
            incarnation=Incarnation(_integer("incarnation", incarnation, 0, _MAX_U64)),
            lease_counter=_integer("lease_counter", lease, 1, _MAX_U64),
            peer_address=_address(peer_address),
            prompt_len=_integer("prompt_len", prompt_len, 1, (1 << 31) - 1),
            prompt_hash=_bytes("prompt_hash", prompt_hash, PROMPT_HASH_BYTES),
            num_blocks=_integer("num_blocks", num_blocks, 1, (1 << 31) - 1),
            params=params,
            mac=_bytes("mac", mac, MAC_BYTES),
        )


def _check_parts(group: KvGroup, region: KvRegion) -> None:
    """Check that the ranks of a region share the blocks of a group, each head of each layer once. Raises `InvalidTicket`."""
    if region.group != group or not cover(group, [share for share, _ in region.parts]):
        raise InvalidTicket(f"the shares of {len(region.parts)} ranks are not each head of each layer once")
    for share, memory in region.parts:
        if memory.num_blocks != region.num_blocks or memory.block_bytes != share.of(group).block_bytes:
            raise InvalidTicket(f"rank {share.rank} has {memory.num_blocks} blocks of {memory.block_bytes} bytes")
        if memory.address + memory.nbytes > _MAX_U64:
            raise InvalidTicket(f"a pool of {memory.num_blocks} blocks at {memory.address:#x} runs past the address space")


def _group_fields(group: KvGroup, region: KvRegion, table: tuple[BlockId, ...]) -> tuple[Any, ...]:
    """Return the fields of one group. The bytes of a block follow from the others."""
    shape = (group.layers, group.planes, group.dtype, group.window)
    live = table[table.count(NULL_BLOCK) :]
    return (*shape, region.num_blocks, tuple(map(_part_fields, region.parts)), live)


def _part_fields(part: tuple[KvShare, Region]) -> tuple[Any, ...]:
    share, memory = part
    layers, heads = ((one.start, one.stop) for one in (share.layers, share.heads))
    return share.rank, layers, heads, memory.address, (memory.device.kind, memory.device.index)


def _unpack(data: bytes) -> tuple[Any, ...]:
    if len(data) > MAX_TICKET_BYTES:
        raise InvalidTicket(f"a ticket of {len(data)} bytes is over the limit of {MAX_TICKET_BYTES}")
    try:
        fields = msgpack.unpackb(data, use_list=False, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException) as exc:  # ValueError also covers bad UTF-8 and nesting
        raise InvalidTicket(f"not a ticket: {exc or type(exc).__name__}") from exc
    if not isinstance(fields, tuple) or not fields:
        raise InvalidTicket(f"not a ticket: {type(fields).__name__}")
    return fields


def _check_version(fields: tuple[Any, ...], known: int, count: int) -> None:
    """Check version and number of fields. The version is the first field in every version, so that a ticket of a newer worker,
    or one of another engine, is told apart from garbage."""
    version = _integer("version", fields[0], 0, (1 << 31) - 1)
    if version != known:
        raise IncompatiblePeer(f"the ticket has version {version}; this worker reads version {known}")
    if len(fields) != count:
        raise InvalidTicket(f"a ticket has {count} fields, but this one has {len(fields)}")


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise InvalidTicket(f"{name} must be an integer from {low} to {high}, got {value!r:.40}")
    return value


def _bytes(name: str, value: Any, count: int) -> bytes:
    if not isinstance(value, bytes) or len(value) != count:
        raise InvalidTicket(f"{name} must be {count} bytes, got {value!r:.40}")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidTicket(f"{name} must be true or false, got {value!r:.40}")
    return value


def _mac(key: bytes, content: bytes) -> bytes:
    return blake2b(content, key=key, digest_size=MAC_BYTES).digest()


def _members(name: str, value: Any, count: int) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or len(value) != count:
        raise InvalidTicket(f"{name} must have {count} members, got {value!r:.40}")
    return value


def _address(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_ADDRESS_CHARS or not value.isprintable():
        raise InvalidTicket(f"peer_address must be host:port, got {value!r:.40}")
    host, sep, port = value.rpartition(":")
    if not (host and sep and port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise InvalidTicket(f"peer_address must be host:port, got {value!r:.40}")
    return value


def _list(name: str, value: Any, most: int) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or not 1 <= len(value) <= most:
        raise InvalidTicket(f"{name} must be a list of 1 to {most}, got {value!r:.40}")
    return value


def _groups(value: Any, block_size: int) -> tuple[KvSpec, tuple[KvRegion, ...], tuple[tuple[BlockId, ...], ...]]:
    """Return the KV groups of the ticket, the regions of the lender's pool, and the leased blocks, one of each for a group."""
    groups, regions, tables = zip(
        *[_group(fields, block_size) for fields in _list("groups", value, MAX_KV_GROUPS)], strict=True
    )
    try:
        return KvSpec(groups), regions, tables
    except ConfigError as exc:
        raise InvalidTicket(f"groups: {exc.message}") from exc


def _group(value: Any, block_size: int) -> tuple[KvGroup, KvRegion, tuple[BlockId, ...]]:
    layers, planes, dtype, window, num_blocks, parts, block_ids = _members("group", value, 7)
    layers = tuple(_integer("group.layers", layer, 0, _MAX_LAYERS - 1) for layer in _list("group.layers", layers, _MAX_LAYERS))
    planes = [_members("group.planes", plane, 2) for plane in _list("group.planes", planes, _MAX_PLANES)]
    shape = (
        layers,
        tuple((_dimension(heads), _dimension(dim)) for heads, dim in planes),
        block_size,
        _dtype(dtype),
        None if window is None else _integer("group.window", window, 1, (1 << 31) - 1),
    )
    try:
        group = KvGroup(*shape)
    except ConfigError as exc:
        raise InvalidTicket(f"group: {exc.message}") from exc
    num_blocks = _integer("num_blocks", num_blocks, 1, (1 << 31) - 1)
    region = KvRegion(group, tuple(_part(part, group, num_blocks) for part in _list("group.parts", parts, MOST_RANKS)))
    return group, region, _block_ids(block_ids, num_blocks)


def _part(value: Any, group: KvGroup, num_blocks: int) -> tuple[KvShare, Region]:
    rank, layers, heads, address, device = _members("group.parts", value, 5)
    share = KvShare(
        _integer("part.rank", rank, 0, MOST_RANKS - 1),
        _range("part.layers", layers, group.num_layers),
        _range("part.heads", heads, group.num_kv_heads),
    )
    try:
        block_bytes = share.of(group).block_bytes
    except ConfigError as exc:
        raise InvalidTicket(f"group.parts: {exc.message}") from exc
    return share, Region(_integer("address", address, 1, _MAX_U64), num_blocks, block_bytes, _device(device))


def _range(name: str, value: Any, most: int) -> range:
    """Return a range that is not empty, of numbers below `most`."""
    start, stop = _members(name, value, 2)
    start = _integer(name, start, 0, most - 1)
    return range(start, _integer(name, stop, start + 1, most))


def _dimension(value: Any) -> int:
    return _integer("group.planes", value, 1, _MAX_DIMENSION)


def _dtype(value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidTicket(f"group.dtype must be a string, got {value!r:.40}")
    if value not in DTYPE_BITS:
        raise IncompatiblePeer(f"the peer's KV has dtype {value!r:.40}; known here: {', '.join(DTYPE_BITS)}")
    return value


def _device(value: Any) -> TransferDevice:
    kind, index = _members("device", value, 2)
    if kind not in ("cpu", "cuda"):
        raise InvalidTicket(f"device must be cpu or cuda, got {kind!r:.40}")
    return TransferDevice(cast(DeviceKind, kind), _integer("device.index", index, 0, 1 << 16))


def _with_dead(live: tuple[BlockId, ...], group: KvGroup, tokens: int) -> tuple[BlockId, ...]:
    """Return the block table of a prompt of `tokens` tokens, whose live blocks are listed. Raises `InvalidTicket`."""
    dead, wanted = group.first_live(tokens), group.blocks_for(tokens)
    if len(live) != wanted - dead:
        raise InvalidTicket(f"{tokens} tokens need {wanted} blocks with {dead} of them behind the window, got {len(live)}")
    return (NULL_BLOCK,) * dead + live


def _block_ids(value: Any, num_blocks: int) -> tuple[BlockId, ...]:
    if not isinstance(value, tuple):
        raise InvalidTicket(f"block_ids must be a list, got {value!r:.40}")
    return tuple(BlockId(_integer("block_ids", block, 0, num_blocks - 1)) for block in value)
