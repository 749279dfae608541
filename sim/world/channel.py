"""A simulated channel of grpc.aio over the fake network, with the methods that our code uses.

Messages cross as bytes. Experiments with grpc.aio showed its behaviour at the end of a call, which is the same here: a
reader whose own side cancels the call gets CancelledError; a write to a finished call raises InvalidStateError; a server
whose client has gone reads EOF, and its handler is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import grpc
import grpc.aio

from sim.world.network import GIVE_UP_S, Fate, Network
from sim.world.process import Process
from sim.world.server import FakeServer
from sim.world.stream import Aborted, ServerContext, StreamCall, open_stream, rpc_error

REFUSED_S: Final = 0.0005

_UNAVAILABLE: Final = grpc.StatusCode.UNAVAILABLE
_UNKNOWN_METHOD: Final = grpc.StatusCode.UNIMPLEMENTED


class FakeChannel:
    """A channel from one process to one address. Closing it cancels the calls that still run."""

    def __init__(self, network: Network, client: Process, address: str) -> None:
        self._network = network
        self._client = client
        self._address = address
        self._open: dict[object, Callable[[], object]] = {}

    async def __aenter__(self) -> FakeChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(None)

    async def close(self, grace: float | None) -> None:
        """Cancel all open calls at once; `grace` is not used."""
        for cancel in list(self._open.values()):
            cancel()
        self._open.clear()

    def unary_unary(
        self, path: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool
    ) -> Callable[..., Any]:
        """Return the function that makes one call with one answer. It raises `AioRpcError` as grpc.aio does."""

        async def call(request: Any, *, timeout: float, metadata: Any) -> Any:
            answer: asyncio.Future[bytes] = self._client.loop.create_future()
            timer = self._client.loop.call_later(timeout, _late, answer)
            self._open[answer] = answer.cancel
            try:
                _Call(self._network, self._client, self._address, path, metadata, answer).send(request_serializer(request))
                return response_deserializer(await answer)
            finally:
                timer.cancel()
                self._open.pop(answer, None)

        return call

    def stream_stream(
        self, path: str, request_serializer: Any, response_deserializer: Any, _registered_method: bool
    ) -> Callable[..., StreamCall]:
        """Return the function that opens one bidirectional stream."""

        def call(*, metadata: Any) -> StreamCall:
            stream = StreamCall(self._client.loop, request_serializer, response_deserializer)
            self._open[stream] = stream.cancel
            self._network.later(self._network.delay_s(), lambda: self._connect(stream, path, metadata))
            return stream

        return call

    def _connect(self, stream: StreamCall, path: str, metadata: Any) -> None:
        if not self._client.alive:
            return
        process, server = self._network.servers.get(self._address, (None, None))
        if process is None or server is None or not process.alive or server.stopped:
            self._client.loop.post(REFUSED_S, stream.broke, rpc_error(_UNAVAILABLE, "connection refused"))
        elif not self._network.joined(self._client, process):
            self._client.loop.post(GIVE_UP_S, stream.broke, rpc_error(_UNAVAILABLE, "connection timed out"))
        elif path not in server.handlers:
            self._client.loop.post(self._network.delay_s(), stream.broke, rpc_error(_UNKNOWN_METHOD, "Method not found!"))
        else:
            open_stream(self._network, stream, self._client, process, server, path, metadata)


class _Call:
    """One unary call. Its request or its answer may be lost or come twice."""

    def __init__(
        self, network: Network, client: Process, address: str, path: str, metadata: Any, answer: asyncio.Future[bytes]
    ) -> None:
        self._network = network
        self._client = client
        self._address = address
        self._path = path
        self._metadata = metadata
        self._answer = answer
        self._method = path.rpartition("/")[2].lower()

    def send(self, data: bytes) -> None:
        if not self._client.alive:
            return
        process, server = self._network.servers.get(self._address, (None, None))
        if process is None or server is None or not process.alive or server.stopped:
            self._client.loop.post(REFUSED_S, _fail, self._answer, rpc_error(_UNAVAILABLE, "connection refused"))
            return
        if self._path not in server.handlers:
            delay_s = self._network.delay_s()
            self._client.loop.post(delay_s, _fail, self._answer, rpc_error(_UNKNOWN_METHOD, "Method not found!"))
            return
        key = object()
        server_process, its_server = process, server
        process.on_death[key] = server.on_stop[key] = lambda: self._server_died(server_process)
        self._answer.add_done_callback(lambda _: (server_process.on_death.pop(key, None), its_server.on_stop.pop(key, None)))
        self._carry(
            f"{self._method}_request", self._client, process, data, lambda d: self._serve(server_process, its_server, d)
        )

    def _serve(self, process: Process, server: FakeServer, data: bytes) -> None:
        if server.stopped:
            return  # the caller has its error
        task = process.loop.create_task(self._handle(process, server.handlers[self._path], data))
        server.on_stop[task] = task.cancel
        task.add_done_callback(lambda _: server.on_stop.pop(task, None))

    async def _handle(self, process: Process, handler: Any, data: bytes) -> None:
        step = f"{self._method}_response"
        try:
            response = await handler.unary_unary(handler.request_deserializer(data), ServerContext(self._metadata))
        except Aborted as exc:
            error = rpc_error(exc.code, exc.details, exc.trailing)
            self._carry(step, process, self._client, b"", lambda _: _fail(self._answer, error))
        except Exception as exc:  # noqa: BLE001 - a handler that raises has a bug
            self._network.timeline.errors.append(f"{process.name}: {self._method} raised {exc!r}")
        else:
            self._carry(step, process, self._client, handler.response_serializer(response), self._resolve)

    def _resolve(self, data: bytes) -> None:
        if not self._answer.done():
            self._answer.set_result(data)

    def _carry(self, step: str, src: Process, dst: Process, data: bytes, receive: Callable[[bytes], None]) -> None:
        if not src.alive:
            return
        fate = self._network.fate((step,), src, dst, self._network.weather.call_loss)
        if not src.alive or fate is Fate.DROP:
            return
        for _ in range(2 if fate is Fate.DUPLICATE else 1):
            self._network.carry((step,), src, dst, data, self._network.delay_s(), receive)

    def _server_died(self, process: Process) -> None:
        error = rpc_error(_UNAVAILABLE, "connection reset")
        self._network.note_death(process, self._client, lambda: _fail(self._answer, error))


def _fail(answer: asyncio.Future[bytes], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


def _late(answer: asyncio.Future[bytes]) -> None:
    _fail(answer, rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
