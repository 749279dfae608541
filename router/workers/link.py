"""The link service: workers dial in, each on one long-lived stream. Owns the connections; knows nothing of requests.

A link is closed when its worker says nothing sensible, when a message was lost, when its outbound queue overflows (the
worker does not read), or when the core asks for it (refused, silent, dialled again). The core hears WorkerLeft whatever
the reason was.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

import grpc.aio

from pdserve.core.errors import InternalBug, Overloaded, PdserveError, ReplicaLost
from pdserve.rpc import status
from pdserve.rpc.numbering import Incoming, Outgoing
from pdserve.rpc.v1 import link_pb2, link_pb2_grpc
from router.core import events as ev
from router.workers.wire import event_from_wire, hello_from_wire

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 5.0
MAX_OUTBOUND: Final = 4096
"""Commands that wait to be written to one worker: several for each request it could hold."""

Deliver = Callable[[ev.WorkerEvent], None]


class Links(Protocol):
    """How the core speaks to workers. Nothing happens for a link that has gone: the core is told of that by an event."""

    def send(self, link_id: ev.LinkId, message: link_pb2.RouterMessage) -> None:
        """Queue a command."""

    def hang_up(self, link_id: ev.LinkId, error: PdserveError) -> None: ...


class Link:
    """One connection. Commands keep their order."""

    def __init__(self, link_id: ev.LinkId, worker: str, numbers_in: Incoming) -> None:
        self.link_id = link_id
        self.worker = worker
        self.error: PdserveError | None = None
        self._outbound: asyncio.Queue[link_pb2.RouterMessage] = asyncio.Queue(MAX_OUTBOUND)
        self._numbers_in = numbers_in
        self._numbers_out = Outgoing()
        self._closed = asyncio.Event()

    def send(self, message: link_pb2.RouterMessage) -> None:
        try:
            self._outbound.put_nowait(message)
        except asyncio.QueueFull:
            error = Overloaded(f"{self.worker} does not read: {MAX_OUTBOUND} commands wait", retry_after_s=1.0)
            self.close(error)

    def close(self, error: PdserveError) -> None:
        self.error = self.error or error
        self._closed.set()

    async def run(self, context: Any, deliver: Deliver, answers: Callable[[], bool]) -> None:
        """Until the worker hangs up, the link is closed or either direction breaks."""
        jobs = (self._read(context, deliver, answers), self._write(context), self._closed.wait())
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, context: Any, deliver: Deliver, answers: Callable[[], bool]) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
            if not self._numbers_in.is_new(message.number):
                continue
            event = event_from_wire(self.link_id, message)
            if event is not None and not self._closed.is_set():
                deliver(event)
            if type(event) is ev.HeartbeatSeen and answers():
                self.send(link_pb2.RouterMessage(alive=link_pb2.Alive()))

    async def _write(self, context: Any) -> None:
        while True:
            message = await self._outbound.get()
            message.number = self._numbers_out.next()
            await context.write(message)


class LinkService(link_pb2_grpc.WorkerLinkServicer):
    def __init__(self, cluster_token: str, deliver: Deliver, answers: Callable[[], bool] = lambda: False) -> None:
        """`deliver` takes every event, on the loop; its effects come back through `send` and `hang_up`. While `answers()`,
        heartbeats are answered here; otherwise that is the core's."""
        self._token = cluster_token.encode()
        self._deliver = deliver
        self._answers = answers
        self._links: dict[ev.LinkId, Link] = {}
        self._count = 0

    def send(self, link_id: ev.LinkId, message: link_pb2.RouterMessage) -> None:
        """Queue a command. Nothing happens for a link that has gone: the core hears of that by itself."""
        link = self._links.get(link_id)
        if link is not None:
            link.send(message)

    def hang_up(self, link_id: ev.LinkId, error: PdserveError) -> None:
        link = self._links.get(link_id)
        if link is not None:
            link.close(error)

    async def Connect(self, request_iterator: Any, context: Any) -> None:
        await self._authenticate(context)
        numbers = Incoming()
        hello = await self._hello(context, numbers)
        self._count += 1
        link = Link(ev.LinkId(self._count), f"{hello.role.value} worker {hello.worker_id}", numbers)

        self._links[link.link_id] = link
        try:
            await context.send_initial_metadata(())  # alone: a refusal could not be sent while a first message carries it
            self._deliver(ev.WorkerJoined(link.link_id, hello))
            logger.info("link %d: %s at %s", link.link_id, link.worker, hello.address)
            await link.run(context, self._deliver, self._answers)
        except (InternalBug, ReplicaLost) as exc:
            link.close(exc)
        finally:
            del self._links[link.link_id]
            self._deliver(ev.WorkerLeft(link.link_id))

        reason = link.error.message if link.error is not None else "hung up"
        logger.warning("link %d: %s at %s ended: %s", link.link_id, link.worker, hello.address, reason)
        if link.error is not None:
            await status.abort(context, link.error)

    async def _authenticate(self, context: Any) -> None:
        given = dict(context.invocation_metadata() or ()).get(status.CLUSTER_TOKEN_METADATA, "")
        given = given if isinstance(given, bytes) else given.encode()
        if not hmac.compare_digest(given, self._token):
            logger.warning("refused a link from %s: wrong cluster token", context.peer())
            with contextlib.suppress(TimeoutError):  # to gRPC a Hello that meets the refusal is an internal error of its sender
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    await context.read()
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{status.CLUSTER_TOKEN_METADATA} does not match")

    async def _hello(self, context: Any, numbers: Incoming) -> ev.WorkerHello:
        """Aborts the call unless the first message is a sensible Hello."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message = await context.read()
        except TimeoutError:
            message = None
        if not isinstance(message, link_pb2.WorkerMessage) or message.WhichOneof("body") != "hello":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"the first message, within {HELLO_TIMEOUT_S} s, must be Hello"
            )
        try:
            numbers.is_new(message.number)
            return hello_from_wire(message.hello)
        except (InternalBug, ReplicaLost) as exc:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, exc.message)
            raise
