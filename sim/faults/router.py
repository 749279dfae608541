"""The router's process: the production service, its core and its links, behind a simulated front end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Final

from pdserve.config import RouterConfig
from pdserve.core.ids import Incarnation
from pdserve.core.kv_layout import KvSpec
from pdserve.rpc.v1 import link_pb2_grpc
from router.core.router_core import RouterCore
from router.grpc.admin import AdminService
from router.service.model import ServedModel
from router.service.service import RouterService
from router.workers.link import LinkService
from sim.faults.grammars import SimChecker
from sim.faults.oracle import CARD, MAX_MODEL_LEN, TOKENIZER
from sim.faults.recorded import MemoryNotes
from sim.faults.watch import CoreWatch
from sim.faults.worker import HEARTBEAT_S, LAYOUT, LOST_S
from sim.world.network import Network
from sim.world.process import Process
from sim.world.server import FakeServer

ADDRESS: Final = "router:1"
MODEL: Final = ServedModel("sim", CARD, TOKENIZER, LAYOUT.dtype, KvSpec((LAYOUT,)), MAX_MODEL_LEN)


CONFIG: Final = RouterConfig(
    heartbeat_interval_s=HEARTBEAT_S,
    heartbeat_lost_s=LOST_S,
    recovery_wait_s=5.0,
    pair_aside_s=0.5,
    pair_aside_max_s=4.0,
    max_client_priority=100,
)
"""Shorter times than in production, in the same proportions."""


class SimRouter:
    """One incarnation of the router."""

    def __init__(
        self,
        process: Process,
        network: Network,
        rng: random.Random,
        config: RouterConfig | None,
        ended_by: Mapping[Incarnation, str],
    ) -> None:
        """`ended_by` names the requests that have ended workers, which the watch over the core must know."""
        self.process = process
        self._network = network
        self._incarnation = Incarnation(rng.getrandbits(64))
        self._config = config or CONFIG
        self._seed = rng.getrandbits(64)
        self._checker = SimChecker(random.Random(self._seed))
        self._ended_by = ended_by
        self.service: RouterService | None = None
        self.watch: CoreWatch | None = None
        self.notes = MemoryNotes(self._config, CARD.fingerprint, self._seed)

    @property
    def core(self) -> RouterCore:
        """The router's core. `run` makes it."""
        assert self.service is not None
        return self.service._core

    async def run(self) -> None:
        """Start the service and its links, on the process's loop."""
        service = RouterService(self._config, MODEL, notes=self.notes, clock=self.process.loop.time, seed=self._seed)
        service.incarnation = self._incarnation  # this one comes from the seed
        service._grammars._checker = self._checker
        errors = self.process.timeline.errors
        self.watch = CoreWatch(service._core, lambda what: errors.append(f"router: {what}"), self._ended_by)
        server = FakeServer()
        assert isinstance(service.links, LinkService)
        service.links._ended = self._ended
        service.links._draw_key = random.Random(self._seed).randbytes
        link_pb2_grpc.add_WorkerLinkServicer_to_server(service.links, server)
        self._network.servers[ADDRESS] = (self.process, server)
        service.start()
        self.service = service
        self.admin = AdminService(service, token=None)

    async def _ended(self, address: str) -> None:
        """Return once a connection to this address would be refused or reset, as `pdserve.rpc.witness.ended` does."""
        process, server = self._network.servers[address]
        gone = asyncio.Event()
        if not process.alive or server.stopped:
            self.process.loop.post(self._network.delay_s(), gone.set)
        key = object()
        process.on_death[key] = lambda: self._network.note_death(process, self.process, gone.set)
        server.on_stop[key] = lambda: self.process.loop.post(self._network.delay_s(), gone.set)
        try:
            await gone.wait()
        finally:
            process.on_death.pop(key, None)
            server.on_stop.pop(key, None)
