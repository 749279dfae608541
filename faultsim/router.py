"""The router's process: the production service, its core and its links, behind a simulated front end."""

from __future__ import annotations

import random
from typing import Final

from faultsim.grammars import SimChecker
from faultsim.oracle import CARD, MAX_MODEL_LEN, TOKENIZER
from faultsim.recorded import MemoryNotes
from faultsim.worker import HEARTBEAT_S, LAYOUT, LOST_S
from pdserve.config import RouterConfig
from pdserve.core.ids import Incarnation
from pdserve.core.kv_layout import KvSpec
from pdserve.rpc.v1 import link_pb2_grpc
from pdserve.sim.network import Network
from pdserve.sim.process import Process
from pdserve.sim.server import FakeServer
from router.core.router_core import RouterCore
from router.grpc.admin import AdminService
from router.service.model import ServedModel
from router.service.service import RouterService
from router.workers.link import LinkService

ADDRESS: Final = "router:1"
MODEL: Final = ServedModel("sim", CARD, TOKENIZER, LAYOUT.dtype, KvSpec((LAYOUT,)), MAX_MODEL_LEN)


CONFIG: Final = RouterConfig(
    heartbeat_interval_s=HEARTBEAT_S, heartbeat_lost_s=LOST_S, recovery_wait_s=5.0, pair_aside_s=0.5, pair_aside_max_s=4.0
)
"""Shorter times than in production, in the same proportions."""


class SimRouter:
    """One incarnation of the router."""

    def __init__(self, process: Process, network: Network, rng: random.Random, config: RouterConfig | None = None) -> None:
        self.process = process
        self._network = network
        self._incarnation = Incarnation(rng.getrandbits(64))
        self._config = config or CONFIG
        self._seed = rng.getrandbits(64)
        self._checker = SimChecker(random.Random(self._seed))
        self.service: RouterService | None = None
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
        server = FakeServer()
        assert isinstance(service.links, LinkService)
        link_pb2_grpc.add_WorkerLinkServicer_to_server(service.links, server)
        self._network.servers[ADDRESS] = (self.process, server)
        service.start()
        self.service = service
        self.admin = AdminService(service, token=None)
