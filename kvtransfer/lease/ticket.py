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

from dataclasses import dataclass, replace
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, Final, cast

import msgpack

from kvtransfer.api import Device, DeviceKind, RemoteRegion
from pdserve.core.block_hash import PROMPT_HASH_BYTES
from pdserve.core.errors import ConfigError, IncompatiblePeer, LeaseGone, TransferFailed
from pdserve.core.ids import BlockId, Incarnation, LeaseId
from pdserve.core.kv_layout import DTYPE_BITS, KvGroup, gqa_group

VERSION: Final = 2
MAC_BYTES: Final = 32
"""The bytes of a MAC: as many as a hash has for which nobody can find a second text."""
MAX_TICKET_BYTES: Final = 1 << 20  # 200,000 blocks of 5 bytes: a prompt of three million tokens
_MAX_ADDRESS_CHARS: Final = 256
_MAX_DIMENSION: Final = 1 << 20
_MAX_U64: Final = (1 << 64) - 1
_NUM_FIELDS: Final = 13


class InvalidTicket(TransferFailed):
    """The bytes are not a ticket, or their fields contradict each other."""


class WrongTicket(LeaseGone):
    """The ticket belongs to another request or lease. The two workers are not to blame; the request is done again."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """The ticket of one lease. `peer_address` is host:port of the lender's Peer and Lease services.

    `address`, `num_blocks` and `device` describe the lender's pool. block_ids[i] holds tokens [i * block_size, (i + 1) *
    block_size) of the prompt, which has `prompt_len` tokens. `prompt_hash` covers the whole prompt and its salt. `checksums`
    True: the lender sums its blocks, and compares its checksums with the reader's.
    """

    incarnation: Incarnation
    lease_counter: int
    peer_address: str
    layout: KvGroup
    address: int
    num_blocks: int
    device: Device
    block_ids: tuple[BlockId, ...]
    prompt_len: int
    prompt_hash: bytes
    checksums: bool
    mac: bytes = bytes(MAC_BYTES)
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.prompt_len < 1:
            raise InvalidTicket(f"a prompt of {self.prompt_len} tokens has no blocks to read")
        if len(self.block_ids) != self.layout.blocks_for(self.prompt_len):
            raise InvalidTicket(
                f"{len(self.block_ids)} blocks of {self.layout.block_size} cannot hold {self.prompt_len} tokens"
            )
        if max(self.block_ids) >= self.num_blocks:
            raise InvalidTicket(f"block {max(self.block_ids)} is outside a pool of {self.num_blocks}")
        if len(set(self.block_ids)) != len(self.block_ids):
            raise InvalidTicket("a block is listed twice")
        if self.address + self.num_blocks * self.layout.block_bytes > _MAX_U64:
            raise InvalidTicket(f"a pool of {self.num_blocks} blocks at {self.address:#x} runs past the address space")

    @property
    def lease_id(self) -> LeaseId:
        """The id of the lease."""
        return LeaseId(self.incarnation, self.lease_counter)

    @property
    def proof(self) -> bytes:
        """The proof that the reader shows to the lender with each call, and that the lender expects."""
        return _mac(self.mac, self._content())

    def with_mac(self, secret: bytes) -> Ticket:
        """Return the ticket with its MAC, as the lender hands it out. `secret` is the lender's own, at most 64 bytes, and new
        at every process start."""
        return replace(self, mac=_mac(secret, self._content()))

    def check_request(self, lease_id: LeaseId, prompt_hash: bytes) -> None:
        """Check that the ticket belongs to this lease, and to this prompt with its salt. Raises `WrongTicket` if not."""
        if self.lease_id != lease_id:
            raise WrongTicket(f"the ticket is of lease {self.lease_id}, not of {lease_id}")
        if not compare_digest(self.prompt_hash, prompt_hash):
            raise WrongTicket(f"the ticket of lease {lease_id} is over another prompt, or another cache_salt")

    def check_checksums(self, ours: bool) -> None:
        """Check that both workers use checksums, or neither. Raises `IncompatiblePeer` if not: one side would then sum its
        blocks with nothing to compare."""
        if self.checksums != ours:
            on, off = (self.peer_address, "this worker") if self.checksums else ("this worker", self.peer_address)
            raise IncompatiblePeer(f"lease.kv_checksum is on at {on} and off at {off}: set it alike for both pools")

    @property
    def region(self) -> RemoteRegion:
        """The lender's pool."""
        return RemoteRegion(self.address, self.num_blocks, self.layout.block_bytes, self.device)

    @property
    def kv_bytes(self) -> int:
        """The bytes of all leased blocks."""
        return len(self.block_ids) * self.layout.block_bytes

    def check_layout(self, local: KvGroup) -> None:
        """Check that our pool can hold the leased KV. Only the dtype may differ: `kvtransfer.staging.staging` then converts.

        Raises `IncompatiblePeer`, which names both layouts: such a pair must never be tried again.
        """
        if not self.layout.holds_the_same_as(local):
            raise IncompatiblePeer(f"KV layouts differ: {self.peer_address} writes {self.layout}, this worker reads {local}")

    def encode(self) -> bytes:
        """Return the bytes of the ticket (msgpack), at most `MAX_TICKET_BYTES`."""
        data = cast(bytes, msgpack.packb((*self._fields(), self.mac)))
        assert len(data) <= MAX_TICKET_BYTES
        return data

    def _content(self) -> bytes:
        return cast(bytes, msgpack.packb(self._fields()))

    def _fields(self) -> tuple[Any, ...]:
        """Return all fields except the MAC."""
        layout = self.layout
        return (
            self.version,
            self.incarnation,
            self.lease_counter,
            self.peer_address,
            (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size, layout.dtype),
            self.address,
            self.num_blocks,
            (self.device.kind, self.device.index),
            self.block_ids,
            self.prompt_len,
            self.prompt_hash,
            self.checksums,
        )

    @classmethod
    def decode(cls, data: bytes) -> Ticket:
        """Read a ticket. Raises `IncompatiblePeer` for another version or an unknown dtype, and `InvalidTicket` for every other
        fault."""
        fields = _unpack(data)
        _check_version(fields)
        _, incarnation, lease, peer_address, layout, address, num_blocks, device, *rest = fields
        block_ids, prompt_len, prompt_hash, checksums, mac = rest
        num_blocks = _integer("num_blocks", num_blocks, 1, (1 << 31) - 1)
        return cls(
            incarnation=Incarnation(_integer("incarnation", incarnation, 0, _MAX_U64)),
            lease_counter=_integer("lease_counter", lease, 1, _MAX_U64),
            peer_address=_address(peer_address),
            layout=_layout(layout),
            address=_integer("address", address, 1, _MAX_U64),
            num_blocks=num_blocks,
            device=_device(device),
            block_ids=_block_ids(block_ids, num_blocks),
            prompt_len=_integer("prompt_len", prompt_len, 1, (1 << 31) - 1),
            prompt_hash=_bytes("prompt_hash", prompt_hash, PROMPT_HASH_BYTES),
            checksums=_flag("checksums", checksums),
            mac=_bytes("mac", mac, MAC_BYTES),
        )


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


def _check_version(fields: tuple[Any, ...]) -> None:
    """Check version and number of fields. The version is the first field in every version, so that a ticket of a newer worker
    is told apart from garbage."""
    version = _integer("version", fields[0], 0, (1 << 31) - 1)
    if version != VERSION:
        raise IncompatiblePeer(f"the ticket has version {version}; this worker reads version {VERSION}")
    if len(fields) != _NUM_FIELDS:
        raise InvalidTicket(f"a ticket has {_NUM_FIELDS} fields, but this one has {len(fields)}")


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


def _layout(value: Any) -> KvGroup:
    *sizes, dtype = _members("layout", value, 5)
    if not isinstance(dtype, str):
        raise InvalidTicket(f"layout.dtype must be a string, got {dtype!r:.40}")
    if dtype not in DTYPE_BITS:
        raise IncompatiblePeer(f"the peer's KV has dtype {dtype!r:.40}; known here: {', '.join(DTYPE_BITS)}")
    names = ("num_layers", "num_kv_heads", "head_dim", "block_size")
    checked = {name: _integer(f"layout.{name}", size, 1, _MAX_DIMENSION) for name, size in zip(names, sizes, strict=True)}
    try:
        return gqa_group(**checked, dtype=dtype)
    except ConfigError as exc:
        raise InvalidTicket(f"layout: {exc.message}") from exc


def _device(value: Any) -> Device:
    kind, index = _members("device", value, 2)
    if kind not in ("cpu", "cuda"):
        raise InvalidTicket(f"device must be cpu or cuda, got {kind!r:.40}")
    return Device(cast(DeviceKind, kind), _integer("device.index", index, 0, 1 << 16))


def _block_ids(value: Any, num_blocks: int) -> tuple[BlockId, ...]:
    if not isinstance(value, tuple) or not value:
        raise InvalidTicket("block_ids must be a list that is not empty")
    return tuple(BlockId(_integer("block_ids", block, 0, num_blocks - 1)) for block in value)
