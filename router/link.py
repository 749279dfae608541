"""The router's end of the links: authenticates, takes Hello, then moves messages between one worker and the core."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, Protocol

import grpc

from pdserve.core.errors import InvalidRequest, PdserveError
from pdserve.rpc.channel import require_token
from pdserve.rpc.status import abort
from pdserve.rpc.v1 import link_pb2, link_pb2_grpc
from router import wire
from router.events import Event, LinkId, WorkerJoined, WorkerLeft

log = logging.getLogger(__name__)

MAX_OUTBOUND: Final = 8192
"""Commands that a worker has not read. One that falls so far behind is stuck, and its link is closed."""
HELLO_TIMEOUT_S: Final = 10.0


class Link:
    """One worker's connection, as the shell sees it."""

    def __init__(self) -> None:
        self._outbound: asyncio.Queue[link_pb2.RouterMessage] = asyncio.Queue(MAX_OUTBOUND)
        self._closed: asyncio.Future[PdserveError] = asyncio.get_running_loop().create_future()

    def send(self, message: link_pb2.RouterMessage) -> None:
        """Never blocks: a worker that does not read loses its link."""
        try:
            self._outbound.put_nowait(message)
        except asyncio.QueueFull:
            self.close(InvalidRequest(f"{MAX_OUTBOUND} commands are unread", field="link"))

    def close(self, error: PdserveError) -> None:
        if not self._closed.done():
            self._closed.set_result(error)

    async def messages(self) -> AsyncIterator[link_pb2.RouterMessage]:
        """What is to be written, in order. Raises the error that `close` was given."""
        while True:
            if self._outbound.empty():
                get = asyncio.ensure_future(self._outbound.get())
                try:
                    await asyncio.wait((get, self._closed), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    if not get.done():
                        get.cancel()
                if self._closed.done():
                    raise self._closed.result()
                yield get.result()
            else:
                yield self._outbound.get_nowait()


class Hub(Protocol):
    """The shell: `router.service.RouterService`."""

    def open_link(self, link: Link) -> LinkId: ...
    def forget_link(self, link_id: LinkId) -> None: ...
    def handle(self, event: Event) -> None: ...


class LinkService(link_pb2_grpc.WorkerLinkServicer):
    def __init__(self, hub: Hub, *, cluster_token: str) -> None:
        self._hub = hub
        self._cluster_token = cluster_token

    async def Connect(
        self, messages: AsyncIterator[link_pb2.WorkerMessage], context: Any
    ) -> AsyncIterator[link_pb2.RouterMessage]:
        await require_token(context, self._cluster_token)
        link = Link()
        link_id = self._hub.open_link(link)
        reading: asyncio.Task[None] | None = None
        try:
            await self._greet(link_id, messages)
            reading = asyncio.create_task(self._read(link_id, messages))
            reading.add_done_callback(_closer(link))
            async for message in link.messages():
                yield message
        except PdserveError as exc:
            log.warning("link %d is closed: %s", link_id, exc.message)
            await abort(context, exc)
        finally:
            self._hub.forget_link(link_id)
            self._hub.handle(WorkerLeft(link_id))
            if reading is not None:
                reading.cancel()

    async def _greet(self, link_id: LinkId, messages: AsyncIterator[link_pb2.WorkerMessage]) -> None:
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                first = await anext(aiter(messages))
        except (TimeoutError, StopAsyncIteration) as exc:
            raise InvalidRequest(f"no Hello within {HELLO_TIMEOUT_S:.0f} s", field="hello") from exc
        hello = wire.hello(first.hello)
        log.info(
            "%s worker %s joins from %s, incarnation %016x", hello.role.value, hello.worker_id, hello.address, hello.incarnation
        )
        self._hub.handle(WorkerJoined(link_id, hello))

    async def _read(self, link_id: LinkId, messages: AsyncIterator[link_pb2.WorkerMessage]) -> None:
        async for message in messages:
            event = wire.event(link_id, message)
            if event is not None:
                self._hub.handle(event)


def _closer(link: Link) -> Callable[[asyncio.Task[None]], None]:
    """A worker that has stopped talking is gone; a bug in reading must not leave a deaf link."""

    def done(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, grpc.aio.AioRpcError | asyncio.CancelledError):
            log.error("reading a link failed", exc_info=error)
        link.close(InvalidRequest("the worker ended the stream", field="link"))

    return done
