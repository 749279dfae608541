"""What a role plugs into, and what it may use of its worker."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import grpc

from kvtransfer.api import Device, DeviceKind, Region
from kvtransfer.reads.thread import TransferThread
from kvtransfer.staging.staging import Staging
from pdserve.checkpoint.card import ModelCard
from pdserve.config import WorkerConfig
from pdserve.core.ids import Handle, Incarnation, SeqId
from pdserve.core.kv_layout import KvLayout
from pdserve.rpc.channel import open_channel
from pdserve.rpc.v1 import link_pb2
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.counted import CountedCommands
from pdserve.worker.messages import Command, StepEvents

if TYPE_CHECKING:  # the roles run without torch where the model is not the real one
    from torch import Tensor

    from pdserve.engine.kv.cache import KvCache

log = logging.getLogger(__name__)


TICKET_SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class KvDamage:
    """Blocks since the start: that readers had not read as they were written here, and that have changed in memory here."""

    corrupt_blocks: int = 0
    rotted_blocks: int = 0


class Role(Protocol):
    """Prefill or decode. All methods run on the loop thread."""

    def on_command(self, message: link_pb2.RouterMessage) -> None: ...
    def on_step(self, events: StepEvents) -> None: ...
    def on_link_lost(self) -> None: ...
    def on_tick(self) -> None:
        """At every heartbeat."""

    @property
    def leases_held(self) -> int: ...
    @property
    def damage(self) -> KvDamage: ...
    @property
    def idle(self) -> bool:
        """No request, lease, read or clean-up is left; the engine may still be at its last step."""

    async def close(self) -> None: ...


@dataclass(slots=True)
class Host:
    """What a role may use of its worker. Loop thread only, but for the immutable parts."""

    config: WorkerConfig
    card: ModelCard
    layout: KvLayout
    region: Region
    tokenizer: Tokenizer
    max_model_len: int
    incarnation: Incarnation
    transfer: TransferThread
    agent_metadata: bytes
    address: str
    server: grpc.aio.Server
    submit: Callable[[Command], None]
    send: Callable[[link_pb2.WorkerMessage], None]
    open_channel: Callable[[str], grpc.aio.Channel] = open_channel
    """To a peer's services."""
    staging: Staging | None = None
    """Reads KV of peers that store it in another dtype; None: such peers are refused."""
    ticket_secret: bytes = field(default_factory=lambda: secrets.token_bytes(TICKET_SECRET_BYTES))
    """What this incarnation seals its tickets with. It never leaves the process."""
    draining: bool = False
    """Nothing new is taken; what is here is finished."""
    counted: CountedCommands = field(default_factory=CountedCommands)
    _last_seq_id: int = 0

    def next_seq_id(self, handle: Handle) -> SeqId:
        """The id of the sequence that this command asks the engine for."""
        self._last_seq_id += 1
        seq_id = SeqId(self._last_seq_id)
        self.counted.give(seq_id, handle)
        return seq_id


CLOSE_TIMEOUT_S: Final = 10.0


async def close_role(role: Role, transfer: TransferThread) -> None:
    """Bounded. Together, because a role waits for its reads to stop, and one that never does stops with the transport."""
    results = await asyncio.gather(_close_in_time(role), transfer.close(), return_exceptions=True)
    if isinstance(results[0], TimeoutError):
        log.error("the role was not closed within %.0f s: a read may still write", CLOSE_TIMEOUT_S)


async def _close_in_time(role: Role) -> None:
    async with asyncio.timeout(CLOSE_TIMEOUT_S):
        await role.close()


RoleFactory = Callable[[Host], Role]


def region_of(kv: KvCache) -> Region:
    """The pool as the transport registers it and a ticket describes it."""
    return Region(kv.address, kv.num_blocks, kv.layout.block_bytes, device_of(kv.blocks))


def device_of(memory: Tensor) -> Device:
    kind: DeviceKind = "cuda" if memory.device.type == "cuda" else "cpu"
    return Device(kind, memory.device.index or 0)
