"""The port on which a worker serves OpenEngine. It belongs to one life of the worker, as leases and sessions do."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any, Final, NoReturn

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdserve.config import WorkerConfig
from pdserve.core.settings.types import is_loopback
from pdserve.core.worker import Role
from pdserve.rpc.channel import require_token
from pdserve.rpc.malformed import MalformedGuard
from pdserve.rpc.server import bind_port, client_options, make_server
from pdserve.rpc.v1 import link_pb2, openengine_pb2, openengine_pb2_grpc
from pdserve.worker.host import Host
from pdserve.worker.member import LinkMember
from pdserve.worker.openengine.control import ControlService
from pdserve.worker.openengine.direct import DirectRequests
from pdserve.worker.openengine.generate import GenerateService

SETTING: Final = "openengine_port"
INFERENCE: Final = openengine_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
CONTROL: Final = openengine_pb2.DESCRIPTOR.services_by_name["Control"].full_name
MAX_CONNECTIONS: Final = 256
SPARE_CALLS: Final = 64
"""The calls that may run beside requests, so that a full worker still tells its state."""
MAX_RECEIVE_BYTES: Final = 8 << 20
"""The largest message, as at the router: 1.5 million ids, or a text, beside the largest session of 1.4 MiB."""
CLOSE_GRACE_S: Final = 2.0
"""Callers get so long to read what is theirs when a life ends."""


class OpenEnginePort:
    """The port of one life. Give `send` to the host, then `start` and `run` it once each, and `close` it in any case."""

    def __init__(self, config: WorkerConfig, to_router: Callable[[link_pb2.WorkerMessage], None], max_num_seqs: int) -> None:
        """`to_router` gets the answers that are not ours. At most `max_num_seqs` sequences run at a time."""
        self.port = 0
        self._config = config
        self._directs = DirectRequests(to_router, max_num_seqs)
        self.send = self._directs.send
        self._token = None if is_loopback(config.host) else config.cluster_token
        self._server = make_server(
            max_receive_bytes=MAX_RECEIVE_BYTES,
            interceptors=[MalformedGuard(name, inline_bytes=MAX_RECEIVE_BYTES) for name in (INFERENCE, CONTROL)],
            options=client_options(MAX_CONNECTIONS),
            max_calls=self._directs.limit + SPARE_CALLS,
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        self._inference: GenerateService | None = None

    async def start(self, host: Host, member: LinkMember, role: Role) -> None:
        """Listen and serve. Raises `ConfigError` that names the setting."""
        assert self._config.openengine_port is not None
        assert member.role is not None
        self._directs.role = member.role
        model = self._config.engine.served_model_name or host.card.name
        self._inference = GenerateService(host, role, model, self._directs, self._authorise)
        control = ControlService(host, member, role, model, self._directs, self._authorise)
        openengine_pb2_grpc.add_InferenceServicer_to_server(self._inference, self._server)
        openengine_pb2_grpc.add_ControlServicer_to_server(control, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((INFERENCE, CONTROL, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)
        self.port = bind_port(self._server, self._config.host, self._config.openengine_port, SETTING)
        await self._publish(serves=True)
        await self._server.start()

    async def close(self) -> None:
        """End all requests and stop to listen."""
        self._directs.close()
        await self._server.stop(CLOSE_GRACE_S if self._directs.num_running else None)
        if self._inference is not None:
            self._inference.close()

    @functools.cached_property
    def address(self) -> str:
        """The address at which callers reach the port."""
        return f"{self._config.advertise_host or self._config.host}:{self.port}"

    async def _authorise(self, context: Any) -> None:
        """Abort a call from another machine without the token of this cluster. On loopback nobody is asked for it, as at the
        port for administration."""
        if self._token is not None:
            await require_token(context, self._token)

    async def run(self, member: LinkMember) -> NoReturn:
        """Do the periodic work of the role, which a link does only while it has a router, and follow a drain. Cancel it."""
        serves = True
        while True:
            await asyncio.sleep(self._config.heartbeat_interval_s)
            assert member.role is not None
            member.role.on_tick()
            if serves and member.draining:
                serves = False
                await self._publish(serves=False)

    async def _publish(self, *, serves: bool) -> None:
        response = health_pb2.HealthCheckResponse
        for name in ("", INFERENCE, CONTROL):
            await self._health.set(name, response.SERVING if serves else response.NOT_SERVING)
