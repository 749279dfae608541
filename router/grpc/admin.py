"""The administration of a router, on a port of its own: the state of the cluster, stories, budgets, drains, and pool sizes.

On loopback everybody on the machine may call. On any other address each call must carry the cluster's token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pdserve.core.errors import InvalidRequest, PdserveError, UnknownWorker
from pdserve.core.settings.types import is_loopback
from pdserve.core.worker import Role
from pdserve.rpc import status
from pdserve.rpc.channel import require_token
from pdserve.rpc.malformed import MalformedGuard
from pdserve.rpc.server import client_options, listen, make_server, stop_server
from pdserve.rpc.v1 import admin_pb2, admin_pb2_grpc, common_pb2, inference_pb2, scaling_pb2, story_pb2
from router.api.router_api import AdminApi
from router.grpc.cluster_state import cluster_state_to_wire
from router.grpc.draining import find, follow, follow_flip
from router.grpc.explanation import explanation_to_wire
from router.grpc.gate import MAX_UNPROVED, Gate
from router.grpc.scaling import ScalingMailbox
from router.parsing.parser import INLINE_BYTES

SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
ROLES: Final = {common_pb2.ROLE_PREFILL: Role.PREFILL, common_pb2.ROLE_DECODE: Role.DECODE}
FOLDER: Final = "pdserve-admin-"
MAX_REQUEST_BYTES: Final = 64 << 10  # a request is one name, the names of some workers, or a report of bounded size


class AdminService(admin_pb2_grpc.AdminServicer):
    """The gRPC service for operators."""

    def __init__(self, router: AdminApi, token: str | None, proved: Callable[[str], None] = lambda peer: None) -> None:
        """Each call must carry `token`. None: no token is needed, as on loopback. `proved` hears the peer of each call that is
        allowed."""
        self._router = router
        self._token = token
        self._proved = proved
        self._mailbox = ScalingMailbox(1 + secrets.randbits(48))

    async def GetClusterState(
        self, request: inference_pb2.GetClusterStateRequest, context: Any
    ) -> inference_pb2.GetClusterStateResponse:
        await self._authorise(context)
        try:
            block_size = self._router.model_info().block_size
            state = cluster_state_to_wire(self._router.snapshot(), block_size, request.page_size, request.page_token)
        except PdserveError as exc:
            await status.abort(context, exc)
            raise
        if (scaling := self._mailbox.state(time.monotonic())) is not None:
            state.scaling.CopyFrom(scaling)
        return state

    async def Drain(self, request: inference_pb2.DrainRequest, context: Any) -> None:
        """Start a drain and stream its progress. If the client leaves or its deadline passes, only the stream ends, not the
        drain."""
        await self._authorise(context)
        try:
            self._mailbox.check_term(request.term)
            worker = find(self._router, request.worker_id, request.incarnation)
            self._router.drain(request.worker_id, force=request.force)
        except PdserveError as exc:
            await status.abort(context, exc)
            raise
        async for progress in follow(self._router.worker, worker):
            await context.write(inference_pb2.DrainProgress(**dataclasses.asdict(progress)))

    async def Flip(self, request: scaling_pb2.FlipRequest, context: Any) -> None:
        """Start a role flip and stream its progress until the worker has joined in its new role. The end of the stream does not
        end the flip."""
        await self._authorise(context)
        try:
            self._mailbox.check_term(request.term)
            if request.role not in ROLES:
                raise InvalidRequest(f"{request.role} is no role", field="role")
            worker = find(self._router, request.worker_id, request.incarnation)
            self._router.flip(request.worker_id, ROLES[request.role], request.incarnation)
            async for progress in follow_flip(self._router.worker, worker, ROLES[request.role]):
                await context.write(inference_pb2.DrainProgress(**dataclasses.asdict(progress)))
        except PdserveError as exc:
            await status.abort(context, exc)
            raise

    async def Scale(self, request: scaling_pb2.ScaleRequest, context: Any) -> scaling_pb2.ScaleResponse:
        await self._authorise(context)
        try:
            return scaling_pb2.ScaleResponse(order=self._mailbox.scale(request, time.monotonic()))
        except PdserveError as exc:
            await status.abort(context, exc)
            raise

    async def Actuate(self, request: scaling_pb2.ActuateRequest, context: Any) -> scaling_pb2.ActuateResponse:
        await self._authorise(context)
        try:
            return self._mailbox.actuate(request, time.monotonic())
        except PdserveError as exc:
            await status.abort(context, exc)
            raise

    async def SetBudget(self, request: admin_pb2.SetBudgetRequest, context: Any) -> admin_pb2.SetBudgetResponse:
        await self._authorise(context)
        try:
            worker_ids = self._named(request)
            self._router.set_budget(worker_ids, request.max_num_batched_tokens, request.max_num_seqs)
        except PdserveError as exc:
            await status.abort(context, exc)
            raise
        return admin_pb2.SetBudgetResponse(worker_ids=worker_ids)

    async def ExplainRequest(self, request: story_pb2.ExplainRequestRequest, context: Any) -> story_pb2.ExplainRequestResponse:
        await self._authorise(context)
        try:
            return explanation_to_wire(await self._router.explain(request.request_id))
        except PdserveError as exc:
            await status.abort(context, exc)
            raise

    def _named(self, request: admin_pb2.SetBudgetRequest) -> list[str]:
        """Return the workers of the request, or those of its pool. Raises `InvalidRequest` and `UnknownWorker`."""
        if bool(request.worker_ids) == bool(request.role):
            raise InvalidRequest("give either worker_ids or role", field="worker_ids")
        if request.worker_ids:
            return list(dict.fromkeys(request.worker_ids))
        if request.role not in ROLES:
            raise InvalidRequest(f"role: {request.role} is no pool", field="role")
        found = [
            worker.hello.worker_id for worker in self._router.snapshot().workers if worker.hello.role is ROLES[request.role]
        ]
        if not found:
            raise UnknownWorker(f"no {ROLES[request.role].value} worker is linked to this router", field="role")
        return [str(worker_id) for worker_id in found]

    async def _authorise(self, context: Any) -> None:
        if self._token is not None:
            await require_token(context, self._token)
        self._proved(context.peer())


class AdminServer:
    """The running server of the admin port. `close` it."""

    def __init__(self, router: AdminApi, cluster_token: str, max_connections: int) -> None:
        self._router = router
        self._cluster_token = cluster_token
        # The gate bounds connections. gRPC may still count some that have just ended there.
        options = client_options(2 * max_connections + MAX_UNPROVED)
        self._server = make_server(
            max_receive_bytes=MAX_REQUEST_BYTES,
            interceptors=[MalformedGuard(SERVICE, inline_bytes=INLINE_BYTES)],
            options=options,
        )
        _sweep()
        self._folder = tempfile.TemporaryDirectory(prefix=FOLDER)  # only this user may enter it
        path = str(Path(self._folder.name) / "grpc")
        self._gate = Gate(path, max_connections)
        self._inner = f"unix:{path}"
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen and serve. Raises `ConfigError` naming --admin-port."""
        sock = listen(host, port, "--admin-port")
        self.port = sock.getsockname()[1]
        try:
            token = None if is_loopback(host) else self._cluster_token
            admin_pb2_grpc.add_AdminServicer_to_server(AdminService(self._router, token, self._gate.proved), self._server)
            self._server.add_insecure_port(self._inner)
            await self._server.start()
        except BaseException:
            sock.close()
            raise
        await self._gate.start(sock)

    async def close(self) -> None:
        """Stop serving."""
        try:
            await stop_server(self._server)
        finally:
            await self._gate.close()
            self._folder.cleanup()


def _sweep() -> None:
    """Remove the folders of routers that were killed: nobody listens in them any more."""
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER}*/grpc"):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as asked:  # others may belong to another user
            asked.setblocking(False)
            try:
                asked.connect(str(path))
            except ConnectionRefusedError:
                shutil.rmtree(path.parent, ignore_errors=True)
