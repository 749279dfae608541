"""One life of a worker: a role with its own incarnation, transport, address and link.

A process has one life after the other, since a role flip ends a life and begins the next one. The engine, the weights and the
KV pool stay, and nothing else does: leases, tickets, handles and connections belong to an incarnation, and so end with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from kvtransfer.api import Region, Transport
from kvtransfer.reads.thread import TransferThread
from kvtransfer.staging.staging import Staging
from pdserve.checkpoint.card import ModelCard
from pdserve.config import WorkerConfig
from pdserve.core.errors import ConfigError, InternalBug, ReplicaLost
from pdserve.core.ids import Incarnation, WorkerId
from pdserve.engine.block_sums import BlockSums
from pdserve.engine.runner import ModelRunner
from pdserve.plugins import resolve
from pdserve.rpc import codec
from pdserve.rpc.channel import server_options
from pdserve.rpc.v1 import common_pb2
from pdserve.structured.compilations import StartGrammar
from pdserve.text.tokenizer import Tokenizer
from pdserve.worker.engine_view import EngineView
from pdserve.worker.host import Host, close_role, region_of
from pdserve.worker.kv_staging import StagedKv
from pdserve.worker.member import LinkMember
from pdserve.worker.messages import SetLending

log = logging.getLogger(__name__)

LAG_PERIOD_S: Final = 0.5
ROLES: Final = {"prefill": "prefill_worker.role:PrefillRole", "decode": "decode_worker.role:DecodeRole"}
"""The class of each role. The two never import each other, and this package imports neither before it is needed."""


@dataclass(frozen=True, slots=True)
class Lasting:
    """The parts of a worker that outlive its lives."""

    config: WorkerConfig
    card: ModelCard
    tokenizer: Tokenizer
    runner: ModelRunner
    engine: EngineView
    make_transport: Callable[[WorkerId, Incarnation, Sequence[Region]], Transport]
    niceness: int
    start_grammar: StartGrammar


class Life:
    """One life. Call `open` and `run` once each, and `close` in any case. `flips` counts the lives before it."""

    def __init__(self, lasting: Lasting, role: common_pb2.Role, flips: int) -> None:
        self.incarnation = Incarnation(secrets.randbits(64))
        self.address = ""
        self.role = codec.role_from_wire(role).value
        self._lasting = lasting
        self._role = role
        config, engine = lasting.config, lasting.engine
        self.member = LinkMember(config, role, engine, pid=os.getpid(), niceness=lasting.niceness, flips=flips)
        self._regions = tuple(map(region_of, lasting.runner.kv.caches))
        self._transfer = self._make_transfer()
        caches = lasting.runner.kv.caches
        self._staging = Staging(
            self._transfer,
            # The memory is that of our KV group that holds the same. The ticket was checked, so there is one.
            lambda layout, count: StagedKv(layout, count, next(c for c in caches if c.layout.holds_the_same_as(layout))),
        )
        self._server = grpc.aio.server(options=server_options())

    def _make_transfer(self) -> TransferThread:
        lasting, regions = self._lasting, self._regions
        worker_id = WorkerId(lasting.config.worker_id)
        sums = {
            region: BlockSums(cache.blocks, beside=True)
            for region, cache in zip(regions, lasting.runner.kv.caches, strict=True)
        }
        return TransferThread(
            lambda: lasting.make_transport(worker_id, self.incarnation, regions),
            sum_blocks=sums if lasting.config.lease.kv_checksum else None,
        )

    async def open(self) -> None:
        """Start transport, role and services. Raises what went wrong; `close` must follow then, too."""
        lasting = self._lasting
        agent_metadata = await self._transfer.start()
        self.address = self._bind()
        host = Host(
            config=lasting.config,
            card=lasting.card,
            model_digest=lasting.runner.model_digest,
            kv_spec=lasting.runner.kv.spec,
            regions=self._regions,
            tokenizer=lasting.tokenizer,
            max_model_len=lasting.runner.max_model_len,
            incarnation=self.incarnation,
            transfer=self._transfer,
            agent_metadata=agent_metadata,
            address=self.address,
            server=self._server,
            submit=lasting.engine.submit,
            send=self.member.link.send,
            start_grammar=lasting.start_grammar,
            staging=self._staging,
            seq_ids=lasting.engine.seq_ids,
        )
        self.member.start(host, resolve(codec.role_from_wire(self._role).value, ROLES, "role"))
        lasting.engine.submit(SetLending(self._role == common_pb2.ROLE_PREFILL))
        servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)
        await self._server.start()

    async def run(self, stop: asyncio.Event) -> common_pb2.Role | None:
        """Run the link until the worker has drained or `stop` is set. Return the role of the next life, or None for the end.

        Raises `ReplicaLost` when a part is stuck, and otherwise what ended a part that is needed.
        """
        member = self.member
        needed = [
            asyncio.create_task(member.link.run(), name="link"),
            asyncio.create_task(_watch_lag(member), name="lag"),
        ]
        broken = asyncio.create_task(member.broken(), name="watch")
        drained = asyncio.create_task(member.drained(), name="drain")
        stopped = asyncio.create_task(stop.wait())
        tasks: list[asyncio.Task[Any]] = [*needed, broken, drained, stopped]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if broken in done:
                raise ReplicaLost(broken.result())
            for task in needed:
                if task in done:
                    task.result()  # raises the error that ended it
                    raise InternalBug(f"{task.get_name()} ended")
            if stopped in done:
                return None
            drained.result()  # raises if something is left that may still write
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return member.next_role  # a drain that came until the link ended has ended the flip

    async def close(self) -> bool:
        """End role, services and transport. Return True if nothing of this life can write into the pool any more."""
        ended = True
        if self.member.role is not None:
            ended = await close_role(self.member.role, self._transfer)
        await self._server.stop(grace=None)
        await self._transfer.close()
        self._staging.close()
        return ended and self._transfer.num_unstopped == 0 and not self._transfer.unhealthy.is_set()

    def _bind(self) -> str:
        """Open the port and return the address that peers use. Raises `ConfigError`, which names the settings."""
        config = self._lasting.config
        try:
            bound = self._server.add_insecure_port(f"{config.host}:{config.port}")
        except RuntimeError as exc:
            raise ConfigError(
                f"cannot listen on {config.host}:{config.port}: set host to an address of this machine, port to a free one"
            ) from exc
        return f"{config.advertise_host or config.host}:{bound}"


async def _watch_lag(member: LinkMember) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + LAG_PERIOD_S
        await asyncio.sleep(LAG_PERIOD_S)
        member.loop_lag_ms = max(0.0, (loop.time() - due_s) * 1000)
