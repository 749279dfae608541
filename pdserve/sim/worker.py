"""One worker: a production role, link and lease services around a simulated engine, transfer thread and network.

What `pdserve.worker.runtime` does with threads is restated here without: hello, heartbeats, commands, drain, the end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, cast

from decode_worker.role import DecodeRole
from kvtransfer.api import Region
from pdserve.config import EngineConfig, LeaseConfig, WorkerConfig
from pdserve.core.blocks import BlockPool
from pdserve.core.ids import Incarnation
from pdserve.core.kv_layout import KvLayout
from pdserve.rpc.v1 import common_pb2, link_pb2
from pdserve.sim.channel import FakeChannel, FakeServer
from pdserve.sim.engine import BLOCK_SIZE, SimEngine, SimKv
from pdserve.sim.network import Network
from pdserve.sim.oracle import CARD, MAX_MODEL_LEN, TOKENIZER
from pdserve.sim.process import Process
from pdserve.sim.transfer import Pools, SimTransfer
from pdserve.worker.host import Host, Role, close_role
from pdserve.worker.link import Link
from pdserve.worker.messages import StepEvents
from prefill_worker.role import PrefillRole

LAYOUT: Final = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_size=BLOCK_SIZE, dtype="float32")
HEARTBEAT_S: Final = 0.5
LOST_S: Final = 2.5
DRAIN_LOOK_S: Final = 0.1
STUCK_S: Final = 8.0


@dataclass(frozen=True, slots=True)
class WorkerShape:
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    lease: LeaseConfig
    drain_timeout_s: float = 10.0


class SimWorker:
    """One incarnation. `run` on its process' loop; `ended` is called when it stops by itself (drained, or unhealthy)."""

    def __init__(
        self,
        process: Process,
        shape: WorkerShape,
        network: Network,
        pools: Pools,
        rng: random.Random,
        reached: Callable[[str, Process], None],
        *,
        poison: bool,
        check_steps: bool,
    ) -> None:
        self.process = process
        self.shape = shape
        self.incarnation = Incarnation(rng.getrandbits(64))
        self.server = FakeServer()
        self.kv = SimKv(shape.num_blocks, rng, poison=poison)
        self.engine = SimEngine(
            process,
            self.kv,
            BlockPool(shape.num_blocks),
            self._on_step,
            lambda step: reached(f"{step}_{process.role}", process),
            rng,
            max_num_seqs=shape.max_num_seqs,
            max_num_batched_tokens=shape.max_num_batched_tokens,
            check_steps=check_steps,
        )
        self.transfer = SimTransfer(process, self.kv, pools, network, rng, reached, stuck_after_s=STUCK_S)
        self.draining = asyncio.Event()
        self.role: Role | None = None
        self.host: Host | None = None
        self.link: Link | None = None
        self._snapshot = self.engine.snapshot()
        self._network = network
        network.servers[self.address] = (process, self.server)
        pools.by_incarnation[self.incarnation] = (process, self.kv)

    @property
    def address(self) -> str:
        return f"{self.process.name}:1"

    async def run(self, ended: Callable[[], None]) -> None:
        agent_metadata = await self.transfer.start()
        self.link = Link(
            "router:1",
            "",
            self._hello,
            self._heartbeat,
            heartbeat_interval_s=HEARTBEAT_S,
            router_lost_s=LOST_S,
            on_command=self._on_command,
            on_lost=lambda: self._role().on_link_lost(),
            open_channel=self._open_channel,
        )
        self.host = self._make_host(agent_metadata, self.link)
        self.role = PrefillRole(self.host) if self.process.role == "prefill" else DecodeRole(self.host)
        jobs = [self.link.run(), self._drained(), self.transfer.unhealthy.wait()]
        tasks = [asyncio.create_task(cast(Any, job)) for job in jobs]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await close_role(self.role, self.transfer)
        ended()

    def drain(self) -> None:
        if self.host is not None and self.link is not None and not self.host.draining:
            self.host.draining = True
            self.draining.set()
            self.link.beat_now()

    @property
    def empty(self) -> bool:
        counts = self.engine.pool.counts()
        return self._role().idle and counts.held == counts.quarantined == 0 and self.engine.scheduler.num_live == 0

    def _make_host(self, agent_metadata: bytes, link: Link) -> Host:
        shape = self.shape
        engine = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=shape.max_num_seqs, max_model_len=MAX_MODEL_LEN)
        config = WorkerConfig(self.process.name, "router:1", engine, shape.lease, drain_timeout_s=shape.drain_timeout_s)
        return Host(
            config=config,
            card=CARD,
            layout=LAYOUT,
            region=Region(1 << 20, shape.num_blocks, LAYOUT.block_bytes),
            tokenizer=TOKENIZER,
            max_model_len=MAX_MODEL_LEN,
            incarnation=self.incarnation,
            transfer=self.transfer,
            agent_metadata=agent_metadata,
            address=self.address,
            server=cast(Any, self.server),
            submit=self.engine.submit,
            send=link.send,
            open_channel=self._open_channel,
        )

    def _open_channel(self, address: str) -> Any:
        return FakeChannel(self._network, self.process, address)

    def _on_step(self, events: StepEvents) -> None:
        if events.snapshot is not None:
            self._snapshot = events.snapshot
        if self.role is not None:
            self.role.on_step(events)

    def _on_command(self, message: link_pb2.RouterMessage) -> None:
        if message.WhichOneof("body") == "drain":
            self.drain()
        else:
            self._role().on_command(message)

    async def _drained(self) -> None:
        await self.draining.wait()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self.shape.drain_timeout_s
        while not self.empty:
            if loop.time() >= end_s:
                return
            await asyncio.sleep(DRAIN_LOOK_S)

    def _role(self) -> Role:
        assert self.role is not None
        return self.role

    def _hello(self) -> link_pb2.Hello:
        return link_pb2.Hello(
            worker_id=self.process.name,
            role=common_pb2.ROLE_PREFILL if self.process.role == "prefill" else common_pb2.ROLE_DECODE,
            incarnation=self.incarnation,
            address=self.address,
            model_fingerprint=CARD.fingerprint,
            block_size=BLOCK_SIZE,
            num_blocks=self.shape.num_blocks,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=self.shape.max_num_seqs,
            dtype=LAYOUT.dtype,
            kv_bytes_per_token=LAYOUT.bytes_per_token,
        )

    def _heartbeat(self) -> link_pb2.Heartbeat:
        self._role().on_tick()
        snapshot, blocks = self._snapshot, self._snapshot.blocks
        return link_pb2.Heartbeat(
            blocks=common_pb2.BlockCounts(
                total=blocks.total,
                free=blocks.free,
                cached=blocks.cached,
                held=blocks.held,
                quarantined=blocks.quarantined,
                unaccounted=blocks.unaccounted,
            ),
            queued_requests=snapshot.num_waiting,
            queued_tokens=snapshot.queued_tokens,
            running_sequences=snapshot.num_running,
            leases_held=self._role().leases_held,
            draining=self.host is not None and self.host.draining,
        )
