"""The transport over NIXL with its UCX backend. No other file imports nixl.

Host memory (DRAM) and CUDA memory (VRAM) take the same path. These facts, all measured, shaped this file:

- NIXL's progress thread spins a whole core unless its delay is set, and the Python wrapper fixes the delay at 0. So the
  agent is built on the binding itself. A delay of 1 ms costs 1.6 % of a core and no throughput, also not on TCP.
- Within one host UCX copies with process_vm_readv (CMA), so posting blocks until all bytes have arrived (10-13 GiB/s for
  blocks of 360 KiB). Over TCP, posting returns at once (1.1 GiB/s on loopback) and the handle is polled.
- The death of a peer shows as an exception, from posting as often as from polling. A stopped peer or a cut link shows no
  sign for minutes, unless TCP's own timers are shortened; callers keep their own deadlines.
- The release of a read in flight reports success, yet late data is still written. So a handle is released only when its
  read is over.
- Over TCP, UCX aborts a passive process ("Fatal: unexpected error: Endpoint timeout") that was stalled when its reader
  went away during a read, as soon as the process goes on, with any timers. A process that was running survives, and so does
  one with CMA. So the death of a reader may kill a lender: its supervisor restarts it, and its leases answer GONE.
- If a connection is made anew while another read of the same peer is unresolved, the clean failure of that read turns into
  one that does not say whether it still writes (NIXL_ERR_NOT_FOUND). So a broken connection is replaced only when its reads
  are over.
- The name of a known agent cannot be loaded again, so agents are named by worker and incarnation.
- NIXL's own helpers for addresses use pickle, and its notifications are unauthenticated. Neither is used here.
- UCX listens at the first address of each interface that it may use, and trusts whoever connects: see
  `kvtransfer.backends.exposure`. NIXL's own parameter for the interfaces, device_list, takes RDMA devices only (it asks
  for "lo:1").
- There is a wheel for each major version of CUDA, and `import nixl` refuses one that does not match torch's.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvtransfer.api import LocalRegion, ReadAdrift, Region, RemoteRegion, TransferDevice, TransportRead, check_shapes
from kvtransfer.backends.cuda import CudaContext, GpuContext
from kvtransfer.backends.exposure import LOOPBACK_HOST, Exposure, exposure_of
from pdserve.core.errors import ConfigError, TransferFailed
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.core.kv_layout import MAX_KV_GROUPS

logger = logging.getLogger(__name__)

PROGRESS_DELAY_US: Final = 1000
MAX_METADATA_BYTES: Final = 1 << 16  # UCX on one host makes 350-450 B
_WHEELS: Final = ("nixl_cu12", "nixl_cu13")
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")

_ENVIRONMENT: Final = {
    "NIXL_LOG_LEVEL": "WARN",
    # With these a dead host is noticed in about 4 s; with UCX's defaults a cut link stays "in progress" for 150 s.
    "UCX_TCP_USER_TIMEOUT": "3s",
    "UCX_TCP_KEEPIDLE": "1s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_KEEPALIVE_INTERVAL": "1s",
    # NIXL's progress thread then sleeps on UCX's lock, which the transfer thread holds while it copies, instead of spinning.
    # It takes 0.68 of the CPU time within one host, and 0.39 of the time of a small read over TCP: docs/benchmarks.md.
    "UCX_USE_MT_MUTEX": "y",
}
_GPU_ENVIRONMENT: Final = {
    # A read within one host then goes from GPU to GPU. Without this, UCX reads so only where it sees NVLink, and takes TCP
    # elsewhere: between two processes on one H100 0.5 GB/s instead of 233 (docs/benchmarks.md).
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",
    # UCX without cuda_ipc would complain of it on standard output, where a worker says that it is ready.
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}


def prepare_environment(environ: MutableMapping[str, str] | None = None, *, gpu: bool = False) -> None:
    """Set the variables that NIXL and UCX read when they are loaded. Values that the user has set stay.

    gpu: the pool is in GPU memory.
    """
    environ = os.environ if environ is None else environ
    for name, value in (_ENVIRONMENT | (_GPU_ENVIRONMENT if gpu else {})).items():
        environ.setdefault(name, value)
    if not (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
        environ.setdefault("UCX_MODULES", "^ib")  # with rdma-core but no device, the process would crash at its exit
        if not gpu:
            # UCX's hooks on memory calls keep its caches of RDMA registrations and of GPU pointers right. There is nothing to
            # cache here, and setting the hooks takes half of an agent's start: 0.22 s of CPU time, and 0.10 without them.
            environ.setdefault("UCX_MEM_EVENTS", "n")


def agent_name(worker_id: WorkerId, incarnation: Incarnation) -> str:
    """Return the name of a worker's NIXL agent, which no other incarnation of the worker has."""
    return f"{worker_id}{_name_suffix(incarnation)}"


def _name_suffix(incarnation: Incarnation) -> str:
    return f"@{incarnation:016x}"


@dataclass(slots=True)
class _Connection:
    name: str
    broken: bool = False
    in_flight: int = 0
    sides: dict[RemoteRegion, int] = field(default_factory=dict)  # the prepared descriptor list of each region


@dataclass(slots=True)
class _Bindings:
    """NIXL's compiled module and its exception types."""

    module: Any
    disconnected: type[Exception] = field(init=False)
    errors: tuple[type[Exception], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.disconnected = self.module.nixlRemoteDisconnectError
        members = vars(self.module).values()
        self.errors = tuple(m for m in members if isinstance(m, type) and issubclass(m, Exception))

    @contextmanager
    def translated(self, doing: str) -> Iterator[None]:
        """Translate NIXL's exceptions to `TransferFailed`. `doing` begins the message."""
        try:
            yield
        except self.errors as exc:
            raise TransferFailed(f"{doing}: {exc}") from exc


def _load(device: TransferDevice) -> _Bindings:
    prepare_environment(gpu=device.kind == "cuda")
    if device.kind != "cuda":
        return _Bindings(load_wheel(None))
    from torch import version

    return _Bindings(load_wheel(version.cuda))


def load_wheel(cuda: str | None) -> Any:
    """Import NIXL's compiled module from the wheel for version `cuda` of CUDA. None: from any wheel that is installed.

    Raises `ConfigError`, which names the missing wheel.
    """
    wheels = _WHEELS if cuda is None else (f"nixl_cu{cuda.partition('.')[0]}",)
    for wheel in wheels:
        try:
            return importlib.import_module(f"{wheel}._bindings")
        except ModuleNotFoundError as exc:
            if exc.name != wheel:
                raise
    wanted = " or ".join(wheel.replace("_", "-") for wheel in wheels)
    built = "" if cuda is None else f": torch was built for CUDA {cuda}"
    raise ConfigError(f"NIXL's wheel {wanted} is not installed{built}; install it with pip install --no-deps {wanted}")


def prepare(host: str, allow_public: bool) -> Callable[[WorkerId, Incarnation, LocalRegion], NixlTransport]:
    """Return the function that makes the transport of a worker that binds `host`. Raises `ConfigError` as
    `exposure_of` does."""
    return functools.partial(NixlTransport, exposure=exposure_of(host, allow_public=allow_public))


class _NixlRead(TransportRead):
    """One read. `request` is NIXL's handle; None once the read is over or adrift. `sides` are descriptor lists of its own."""

    __slots__ = ("connection", "request", "sides")

    def __init__(self, peer: Incarnation, num_blocks: int, request: int, connection: _Connection, sides: Sequence[int]) -> None:
        super().__init__(peer, num_blocks)
        self.request: int | None = request
        self.connection = connection
        self.sides = sides
        connection.in_flight += 1

    def take_request(self) -> int:
        """Return NIXL's handle and count the read as no longer in flight: it is over, or adrift."""
        assert self.request is not None
        request, self.request = self.request, None
        self.connection.in_flight -= 1
        return request


class NixlTransport:
    """One NIXL agent over one registered pool. `kvtransfer.api.Transport` has the contract of each method."""

    def __init__(
        self,
        worker_id: WorkerId,
        incarnation: Incarnation,
        regions: Sequence[LocalRegion],
        *,
        exposure: Exposure | None = None,
        progress_delay_us: int = PROGRESS_DELAY_US,
        gpu_context: Callable[[int], GpuContext] = CudaContext,
    ) -> None:
        """Start the agent and register the regions of the pool.

        `exposure` None stands for loopback. `gpu_context` is called with the GPU's index for a pool in GPU memory; the
        context must be current when it returns.

        Raises `TransferFailed` when the agent cannot start or the pool cannot be registered, and `ConfigError` when the
        settings or the machine do not allow it.
        """
        exposure = exposure or exposure_of(LOOPBACK_HOST, allow_public=False)
        self._regions = tuple(regions)
        device = self._regions[0].device
        self._local_sides: dict[LocalRegion, int] = {}
        """NIXL's prepared descriptor list of each registered region."""
        self._peers: dict[Incarnation, _Connection] = {}
        self._unreleased: list[int] = []  # requests of reads that are adrift, which are never released
        self._agent: Any = None
        self._gpu = gpu_context(device.index) if device.kind == "cuda" else None
        try:
            self._nixl = _load(device)
            with self._nixl.translated("cannot start the NIXL agent"), exposure.applied():
                self._start_agent(agent_name(worker_id, incarnation), progress_delay_us)
        except BaseException:
            self.close()
            raise

    def _start_agent(self, name: str, progress_delay_us: int) -> None:
        module = self._nixl.module
        config = module.nixlAgentConfig()
        config.useProgThread = True  # without it a passive side that makes no calls never answers
        config.pthrDelay = progress_delay_us
        config.useListenThread = False
        config.syncMode = module.NIXL_THREAD_SYNC_NONE
        self._agent = module.nixlAgent(name, config)
        self._backend = self._agent.createBackend("UCX", {})
        for region in self._regions:
            self._local_side(region)
        self._metadata = bytes(self._agent.getLocalMD())

    @property
    def num_peers(self) -> int:
        """The number of peers whose metadata and descriptors are kept, alive or not."""
        return len(self._peers)

    def metadata(self) -> bytes:
        """Return the metadata of the agent with its pool."""
        return self._metadata

    def connect(self, incarnation: Incarnation, metadata: bytes) -> None:
        """Load the metadata of a peer's agent. Raises `TransferFailed`, also when the metadata is of another agent."""
        known = self._peers.get(incarnation)
        if known is not None and not known.broken:
            return
        if known is not None and known.in_flight:
            raise TransferFailed(f"{known.in_flight} reads of peer {incarnation:016x} are unresolved on a broken connection")
        self.disconnect(incarnation)
        _check_metadata(incarnation, metadata)
        with self._nixl.translated(f"cannot connect to peer {incarnation:016x}"):
            loaded = self._agent.loadRemoteMD(metadata)
            name = loaded if isinstance(loaded, str) else loaded.decode("utf-8", "replace")
        if not name.endswith(_name_suffix(incarnation)):
            self._forget(name)
            raise TransferFailed(f"the metadata of peer {incarnation:016x} names agent {name!r}")
        self._peers[incarnation] = _Connection(name)

    def disconnect(self, incarnation: Incarnation) -> None:
        """Release the peer's descriptors and forget its agent. Failures of NIXL are only logged."""
        connection = self._peers.pop(incarnation, None)
        if connection is None:
            return
        self._release(connection.sides.values())
        self._forget(connection.name)

    def post_read(
        self,
        peer: Incarnation,
        region: RemoteRegion,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        into: LocalRegion,
    ) -> TransportRead:
        """Make NIXL's request for the read and post it. Posting blocks while UCX copies within one host."""
        connection = self._peers.get(peer)
        if connection is None or connection.broken:
            raise TransferFailed(f"peer {peer:016x} is not connected")
        check_shapes(into, region, remote_blocks, local_blocks)
        theirs, ours = self._remote_side(connection, region.whole), self._local_side(into.whole)
        remote, local = np.asarray(remote_blocks, dtype=np.int32), np.asarray(local_blocks, dtype=np.int32)
        own: list[int] = []
        try:
            with self._nixl.translated(f"cannot make a read of peer {peer:016x}"):
                if region.pieces or into.pieces:
                    # Lists of all pieces of a pool would have millions of rows, so a read of pieces has lists of its own.
                    own.append(self._prepare(connection.name, region, remote_blocks))
                    own.append(self._prepare(self._nixl.module.NIXL_INIT_AGENT, into, local_blocks))
                    theirs, ours = own
                    remote = local = np.arange(len(local_blocks) * len(into.lengths), dtype=np.int32)
                request = self._agent.makeXferReq(
                    self._nixl.module.NIXL_READ, ours, local, theirs, remote, b"", [self._backend], False
                )
        except TransferFailed:
            self._release(own)
            raise
        handle = _NixlRead(peer, len(local_blocks), request, connection, own)
        self._advance(handle, self._agent.postXferReq)
        return handle

    def poll(self, handle: TransportRead) -> bool:
        """Ask NIXL for the state of a read. Raises `TransferFailed`, or `ReadAdrift` when the failure is not clean."""
        assert isinstance(handle, _NixlRead)
        if handle.request is None:
            return True
        return self._advance(handle, self._agent.getXferStatus)

    def close(self) -> None:
        """End the agent with its connections and registrations; reads in flight lose their sockets."""
        for incarnation in list(self._peers):
            self.disconnect(incarnation)
        for side in self._local_sides.values():
            self._agent.releasedDlistH(side)
        self._local_sides.clear()
        self._agent = None
        if self._gpu is not None:
            self._gpu.close()

    def _advance(self, handle: _NixlRead, ask: Any) -> bool:
        """Post or poll a read by `ask`, and return whether it is done. All its possible ends are handled here."""
        assert handle.request is not None
        peer = f"peer {handle.peer:016x}"
        try:
            status = ask(handle.request)
        except self._nixl.disconnected as exc:
            self._finish(handle)
            handle.connection.broken = True
            raise TransferFailed(f"{peer} disconnected during a read of {handle.num_blocks} blocks") from exc
        except self._nixl.errors as exc:
            self._abandon(handle)
            raise ReadAdrift(f"a read of {handle.num_blocks} blocks from {peer} failed: {exc}") from exc
        if status == self._nixl.module.NIXL_IN_PROG:
            return False
        if status != self._nixl.module.NIXL_SUCCESS:
            self._abandon(handle)
            raise ReadAdrift(f"a read of {handle.num_blocks} blocks from {peer} ended as {status}")
        self._finish(handle)
        return True

    def _finish(self, handle: _NixlRead) -> None:
        try:
            self._agent.releaseXferReq(handle.take_request())
        except self._nixl.errors as exc:
            logger.warning("NIXL kept a finished read of peer %016x: %s", handle.peer, exc)
        self._release(handle.sides)

    def _release(self, sides: Iterable[int]) -> None:
        """Release descriptor lists. Failures of NIXL are only logged."""
        for side in sides:
            try:
                self._agent.releasedDlistH(side)
            except self._nixl.errors as exc:
                logger.warning("NIXL kept a list of descriptors: %s", exc)

    def _abandon(self, handle: _NixlRead) -> None:
        """Keep NIXL's request until the agent ends: a release would hide that the read may still write."""
        self._unreleased.append(handle.take_request())

    def _forget(self, name: str) -> None:
        try:
            self._agent.invalidateRemoteMD(name)
        except self._nixl.errors as exc:
            logger.debug("NIXL had already dropped agent %s: %s", name, exc)

    def _local_side(self, region: LocalRegion) -> int:
        """Return the region's descriptor list; register the region at its first use.

        The metadata was taken when only the pool was registered, so peers do not learn of other regions.
        """
        if region not in self._local_sides:
            self._register(region)
            self._local_sides[region] = self._prepare(self._nixl.module.NIXL_INIT_AGENT, region)
        return self._local_sides[region]

    def _register(self, region: Region) -> None:
        """Register a region with NIXL. Wait for the GPU first, so that its pending writes cannot overwrite KV that is read."""
        if self._gpu is not None:
            self._gpu.synchronize()
        module = self._nixl.module
        descriptors = module.nixlRegDList(self._memory(region), [(region.address, region.nbytes, region.device.index, "")])
        self._agent.registerMem(descriptors, [self._backend])

    def _remote_side(self, connection: _Connection, region: RemoteRegion) -> int:
        """Return the descriptors of a whole region of a peer's pool, which are prepared once.

        Raises `TransferFailed` when the region overlaps another one, because the pool has moved then, or for too many.
        """
        sides = connection.sides
        if region in sides:
            return sides[region]
        moved = next((known for known in sides if known.overlaps(region)), None)
        if moved is not None:
            raise TransferFailed(f"agent {connection.name} moved its pool from {moved} to {region}")
        if len(sides) == MAX_KV_GROUPS:
            raise TransferFailed(f"agent {connection.name} names more than {MAX_KV_GROUPS} regions of its pool")
        with self._nixl.translated(f"the pool {region} is not agent {connection.name}'s"):
            sides[region] = self._prepare(connection.name, region)
        return sides[region]

    def _prepare(self, owner: str, region: Region, blocks: Sequence[int] | None = None) -> int:
        """Return a prepared descriptor list from [rows, 3] uint64: one row (address, length, device) for each piece of each
        block. `blocks` None: of all blocks."""
        begins = np.arange(region.num_blocks) if blocks is None else np.asarray(blocks)
        lengths = np.array(region.lengths, dtype=np.uint64)
        rows = np.empty((len(begins), len(lengths), 3), dtype=np.uint64)
        rows[..., 0] = region.address + begins.astype(np.uint64)[:, None] * np.uint64(region.block_bytes)
        rows[..., 0] += np.array(region.offsets, dtype=np.uint64)
        rows[..., 1] = lengths
        rows[..., 2] = region.device.index
        descriptors = self._nixl.module.nixlXferDList(self._memory(region), rows.reshape(-1, 3))
        return int(self._agent.prepXferDlist(owner, descriptors, [self._backend]))

    def _memory(self, region: Region) -> Any:
        module = self._nixl.module
        return module.VRAM_SEG if region.device.kind == "cuda" else module.DRAM_SEG


def _check_metadata(incarnation: Incarnation, metadata: bytes) -> None:
    """Check a peer's metadata before NIXL loads it: if an agent that is known already is loaded again, its reads break.

    NIXL writes an agent's name into its metadata as plain text. Raises `TransferFailed` when the metadata is too long or does
    not have the peer's name.
    """
    if len(metadata) > MAX_METADATA_BYTES:
        raise TransferFailed(f"peer {incarnation:016x} sent {len(metadata)} bytes of agent metadata")
    if _name_suffix(incarnation).encode() not in metadata:
        raise TransferFailed(f"the metadata of peer {incarnation:016x} is of another agent")
