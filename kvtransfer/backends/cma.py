"""The transport over cross-memory attach (process_vm_readv): the processes of one machine and one user, in host memory.

The transport needs no library, so it serves where NIXL is not installed. A read is over when it is posted. The transport opens
nothing to the network, but lets every process of this user read the memory of this process, as UCX does for the same call.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
import numpy.typing as npt

from kvtransfer.api import LocalRegion, Region, RemoteRegion, TransportRead, check_shapes
from pdserve.core.errors import ConfigError, TransferFailed
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.kv_layout import MAX_KV_GROUPS

CALL_PIECES: Final = 512  # a call takes at most 1024 (IOV_MAX)
CALL_BYTES: Final = 1 << 30  # a call moves less than 2 GiB
MAX_METADATA_BYTES: Final = 512
_PR_SET_PTRACER: Final = 0x59616D61
_PR_SET_PTRACER_ANY: Final = ctypes.c_ulong(-1)
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


Pieces = npt.NDArray[np.uint64]
"""[pieces, 2]: the address of each piece and its bytes, which is `struct iovec` of the system call."""
_LIBC.process_vm_readv.restype = ctypes.c_ssize_t
_LIBC.process_vm_readv.argtypes = (
    ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Process:
    """One process and its pool. `pool` has the address, the number of blocks and the bytes of a block of each KV group.
    `machine` names the boot of the machine and the namespace of process ids."""

    incarnation: int
    machine: str
    pid: int
    started: str  # ticks since the boot; another process may get the id of one that has ended
    pool: tuple[tuple[int, int, int], ...]

    @property
    def regions(self) -> tuple[RemoteRegion, ...]:
        """The pool in the process's address space."""
        return tuple(Region(*region) for region in self.pool)


class CmaTransport:
    """Reads the pools of other processes. `kvtransfer.api.Transport` has the contract of each method."""

    def __init__(self, worker_id: WorkerId, incarnation: Incarnation, regions: Sequence[LocalRegion]) -> None:
        """Let other processes read this one. Raises `ConfigError` for a pool in GPU memory."""
        if any(region.device.kind != "cpu" for region in regions):
            raise ConfigError(f"transfer.transport cma reads host memory only, and the KV of {worker_id} is on a GPU: use nixl")
        _LIBC.prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)  # fails where no rule forbids reading anyway
        pid = os.getpid()
        pool = tuple((region.address, region.num_blocks, region.block_bytes) for region in regions)
        own = _Process(incarnation, _machine(), pid, _started(pid), pool)
        self._metadata: bytes = msgpack.packb(astuple(own))
        self._peers: dict[Incarnation, _Process] = {}

    def metadata(self) -> bytes:
        """Return the description of this process and its pool."""
        return self._metadata

    def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        """Remember the process of a peer. Raises `TransferFailed` for a process of another machine and for a process that has
        ended."""
        peer = _parse(metadata)
        name = f"peer {incarnation:016x}"
        if peer.incarnation != incarnation:
            raise TransferFailed(f"the metadata of {name} names another process")
        if peer.machine != _machine():
            raise TransferFailed(f"{name} is on another machine, or in a container of its own; transport cma does not reach it")
        _check_alive(peer)
        self._peers[incarnation] = peer

    def disconnect(self, incarnation: Incarnation) -> None:
        """Forget a peer."""
        self._peers.pop(incarnation, None)

    def post_read(
        self,
        peer: Incarnation,
        region: RemoteRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        into: LocalRegion,
    ) -> TransportRead:
        """Copy the blocks. Every byte has arrived when this returns."""
        process = self._peers.get(peer)
        if process is None:
            raise TransferFailed(f"peer {peer:016x} is not connected")
        check_shapes(into, region, remote_blocks, local_blocks)
        if region.whole not in process.regions:
            raise TransferFailed(f"the pool {region.whole} is not peer {peer:016x}'s")
        _check_alive(process)
        theirs, ours = _pieces_of(region, remote_blocks), _pieces_of(into, local_blocks)
        size = max(1, min(CALL_PIECES, CALL_BYTES // max(region.lengths)))
        for start in range(0, len(ours), size):
            _copy(process, theirs[start : start + size], ours[start : start + size])
        return TransportRead(peer, len(local_blocks))

    def poll(self, handle: TransportRead) -> bool:
        """Return True: a read is over when it is posted."""
        return True

    def close(self) -> None:
        """Forget every peer."""
        self._peers.clear()


def prepare(host: str, allow_public: bool) -> type[CmaTransport]:
    """Return the class, which is its own `MakeTransport`. Any `host` is allowed, because nothing is opened to the network."""
    return CmaTransport


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"


def _started(pid: int) -> str:
    """Return when a process was started, in ticks. Empty: there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()


def _check_alive(peer: _Process) -> None:
    if not peer.started or _started(peer.pid) != peer.started:
        raise TransferFailed(f"cannot connect to peer {peer.incarnation:016x}: its process {peer.pid} has ended")


def _parse(metadata: bytes) -> _Process:
    """Read the description that a peer gave. Raises `TransferFailed` for anything else."""
    kinds = (int, str, int, str, tuple)
    fields: Any = ()
    try:
        fields = msgpack.unpackb(metadata[: MAX_METADATA_BYTES + 1], use_list=False)
    except (ValueError, msgpack.exceptions.UnpackException):
        pass
    if not isinstance(fields, tuple) or tuple(map(type, fields)) != kinds or fields[2] < 1 or not _is_pool(fields[4]):
        raise TransferFailed(f"the metadata of {len(metadata)} bytes is not that of a cma transport")
    return _Process(*fields)


def _is_pool(value: tuple[Any, ...]) -> bool:
    """Tell whether a value describes 1 to `MAX_KV_GROUPS` regions by three positive integers each."""
    rows = [row if isinstance(row, tuple) and len(row) == 3 else (None,) for row in value]
    return 1 <= len(rows) <= MAX_KV_GROUPS and all(type(field) is int and field >= 1 for row in rows for field in row)


def _pieces_of(region: Region, blocks: Sequence[int]) -> Pieces:
    """Return the pieces of the blocks that a read copies."""
    begins = region.address + np.array(blocks, np.uint64)[:, None] * np.uint64(region.block_bytes)
    pieces = np.empty((len(blocks), len(region.lengths), 2), np.uint64)
    pieces[..., 0] = begins + np.array(region.offsets, np.uint64)
    pieces[..., 1] = np.array(region.lengths, np.uint64)
    return pieces.reshape(-1, 2)


def _copy(process: _Process, remote: Pieces, local: Pieces) -> None:
    """Copy each piece to the local one of the same length. Raises `TransferFailed` when not every byte was copied."""
    count, nbytes = len(local), int(local[:, 1].sum())
    copied = _LIBC.process_vm_readv(process.pid, local.ctypes.data, count, remote.ctypes.data, count, 0)
    if copied != nbytes:
        reason = os.strerror(ctypes.get_errno()) if copied < 0 else f"{copied} of {nbytes} bytes were read"
        raise TransferFailed(f"a read of {count} pieces from peer {process.incarnation:016x} failed: {reason}")
