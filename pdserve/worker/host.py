"""The interface between a worker and its role: the calls that a role gets, and the parts of the worker that it may use."""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import grpc

from kvtransfer.api import DeviceKind, Region, TransferDevice
from kvtransfer.reads.thread import TransferThread
from kvtransfer.staging.staging import Staging
from pdserve.checkpoint.card import ModelCard
from pdserve.config import WorkerConfig
from pdserve.core.ids import Handle, Incarnation, SeqId
from pdserve.core.kv_layout import KvSpec
from pdserve.rpc.channel import open_channel
from pdserve.rpc.v1 import link_pb2
from pdserve.structured.compilations import StartGrammar, no_grammars
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.counted import CountedCommands
from pdserve.worker.messages import Command, StepEvents
from pdserve.worker.stories import WorkStories

if TYPE_CHECKING:  # the roles run without torch where the model is not the real one
    from torch import Tensor

    from pdserve.engine.kv.cache import KvCache

log = logging.getLogger(__name__)


TICKET_SECRET_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class KvDamage:
    """The damaged blocks of KV since the start. `corrupt_blocks` counts blocks whose checksums differed at their readers;
    `rotted_blocks` counts blocks that have changed in this worker's memory."""

    corrupt_blocks: int = 0
    rotted_blocks: int = 0


class HostedRole(Protocol):
    """The role of a worker, prefill or decode. All methods run on the loop thread."""

    def on_command(self, message: link_pb2.RouterMessage) -> None:
        """Handle one command of the router."""

    def on_step(self, events: StepEvents) -> None:
        """Handle the events of one engine step."""

    def on_link_lost(self) -> None:
        """Drop all that the router had placed here, because the link to it is lost."""

    def on_tick(self) -> None:
        """Do the periodic work. The worker calls this at every heartbeat."""

    @property
    def leases_held(self) -> int:
        """The number of leases that this worker has granted and still holds."""

    @property
    def damage(self) -> KvDamage:
        """The damaged blocks of KV since the start."""

    @property
    def idle(self) -> bool:
        """True when no request, lease, read or clean-up is left. The engine may still run its last step."""

    async def close(self) -> None:
        """Drop all requests, and wait until their reads have stopped."""


@dataclass(slots=True)
class Host:
    """The parts of a worker that its role may use. Only the loop thread uses them, except the immutable ones."""

    config: WorkerConfig
    card: ModelCard
    kv_spec: KvSpec
    regions: tuple[Region, ...]
    """The region of each KV group."""
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
    """Opens a channel to a peer's services."""
    start_grammar: StartGrammar = no_grammars
    """Compiles the constraint of a request. A thread of the role calls it."""
    staging: Staging | None = None
    """Reads KV of peers that store it in another dtype. None: such peers are refused."""
    ticket_secret: bytes = field(default_factory=lambda: secrets.token_bytes(TICKET_SECRET_BYTES))
    """The key with which this incarnation seals its tickets. It never leaves the process."""
    draining: bool = False
    """True when the worker takes no new request and only finishes those that it has."""
    link_version: int = 0
    """The version of the link's protocol that this worker and its router speak. 0: that of a router without versions."""
    counted: CountedCommands = field(default_factory=CountedCommands)
    stories: WorkStories = field(default_factory=WorkStories)
    model_digest: str = ""
    """The name of the model with every byte of its weights. Empty: they do not come from files."""
    seq_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    """The ids of new sequences. An engine that has served another role goes on with its own ids."""

    def next_seq_id(self, handle: Handle) -> SeqId:
        """Return a new id for the sequence that this command starts in the engine."""
        seq_id = SeqId(next(self.seq_ids))
        self.counted.give(seq_id, handle)
        return seq_id


CLOSE_TIMEOUT_S: Final = 10.0


async def close_role(role: HostedRole, transfer: TransferThread) -> bool:
    """Close role and transport at the same time: the role waits until its reads have stopped, and a read that does not stop by
    itself stops with the transport. The wait for the role ends after `CLOSE_TIMEOUT_S`. Return True if both have closed."""
    results = await asyncio.gather(_close_in_time(role), transfer.close(), return_exceptions=True)
    for part, result in zip(("role", "transport"), results, strict=True):
        if isinstance(result, TimeoutError):
            log.error("the %s was not closed within %.0f s: a read may still write", part, CLOSE_TIMEOUT_S)
        elif isinstance(result, Exception):
            log.error("the %s was not closed", part, exc_info=result)
    return all(result is None for result in results)


async def _close_in_time(role: HostedRole) -> None:
    async with asyncio.timeout(CLOSE_TIMEOUT_S):
        await role.close()


RoleFactory = Callable[[Host], HostedRole]


def region_of(kv: KvCache) -> Region:
    """Return the region of the blocks of one KV group, which the transport registers and a ticket describes."""
    return Region(kv.address, kv.num_blocks, kv.layout.block_bytes, device_of(kv.blocks))


def device_of(memory: Tensor) -> TransferDevice:
    """Return the device of a tensor as the transport names it."""
    kind: DeviceKind = "cuda" if memory.device.type == "cuda" else "cpu"
    return TransferDevice(kind, memory.device.index or 0)
