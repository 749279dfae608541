"""The link service. Workers dial in, each on one long-lived stream. The service owns the connections and knows nothing of
requests.

A link is closed when its worker breaks the protocol, when a message was lost, when its outbound queue overflows because the
worker does not read, or when the core asks for it (the worker is refused, lost, or has dialled again). Whatever the reason, the
core hears WorkerLeft.
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
from pdserve.core.worker import LINK_VERSIONS, WorkerHello
from pdserve.rpc import status
from pdserve.rpc.bundle import Outbound, unbundled
from pdserve.rpc.numbering import Incoming
from pdserve.rpc.v1 import link_pb2, link_pb2_grpc
from router.core import events as ev
from router.workers.wire import Heard, event_from_wire, hello_from_wire

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 5.0
MAX_OUTBOUND: Final = 4096
"""At most this many commands wait to be written to one worker: several for each request that it could hold."""

Deliver = Callable[[Heard], None]


class Links(Protocol):
    """The core's way to workers. A call for a link that has gone does nothing, because an event tells the core that the link
    has gone."""

    def send(self, link_id: ev.LinkId, message: link_pb2.RouterMessage) -> None:
        """Queue a command."""

    def hang_up(self, link_id: ev.LinkId, error: PdserveError) -> None:
        """Close a link. The error tells the worker why."""


class Link:
    """One connection. Commands keep their order."""

    def __init__(self, link_id: ev.LinkId, worker: str, numbers_in: Incoming, *, bundles: bool) -> None:
        self.link_id = link_id
        self.worker = worker
        self.error: PdserveError | None = None
        self._outbound: Outbound[link_pb2.RouterMessage] = Outbound(MAX_OUTBOUND)
        self._outbound.bundles = bundles
        self._numbers_in = numbers_in
        self._closed = asyncio.Event()
        self._told_unknown = False
        self.last_word = "hung up or died"
        """Why the worker ends. It may be gone before the core has heard its word and closes the link."""

    def send(self, message: link_pb2.RouterMessage) -> None:
        """Queue a command. A full queue closes the link, because its worker does not read."""
        try:
            self._outbound.put(message)
        except asyncio.QueueFull:
            error = Overloaded(f"{self.worker} does not read: {MAX_OUTBOUND} commands wait", retry_after_s=1.0)
            self.close(error)

    def close(self, error: PdserveError) -> None:
        """Close the link. The first error is the one that the worker is told."""
        self.error = self.error or error
        self._closed.set()

    async def run(self, context: Any, deliver: Deliver, answers: Callable[[], bool]) -> None:
        """Read and write until the worker hangs up, the link is closed, or either direction breaks. While `answers()`,
        heartbeats are answered here."""
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
            if self._numbers_in.is_new(message.number):
                for one in unbundled(message):
                    self._hear(one, deliver, answers)

    def _hear(self, message: link_pb2.WorkerMessage, deliver: Deliver, answers: Callable[[], bool]) -> None:
        event = event_from_wire(self.link_id, message)
        if type(event) is ev.WorkerLost:
            self.last_word = event.message
        if event is None:
            self._hear_unknown()
        elif not self._closed.is_set():
            deliver(event)
        if type(event) is ev.HeartbeatSeen and answers():
            self.send(link_pb2.RouterMessage(alive=link_pb2.Alive()))

    def _hear_unknown(self) -> None:
        """Log, once for each link, that the worker sent a message that this release does not know."""
        if not self._told_unknown:
            self._told_unknown = True
            logger.error(
                "link %d: %s sent a message that this router does not know, which speaks version %s of the link's protocol: "
                "nothing was done; upgrade this router",
                self.link_id,
                self.worker,
                LINK_VERSIONS,
            )

    async def _write(self, context: Any) -> None:
        while True:
            await context.write(await self._outbound.next())


class LinkService(link_pb2_grpc.WorkerLinkServicer):
    """The gRPC service that workers dial."""

    def __init__(self, cluster_token: str, deliver: Deliver, answers: Callable[[], bool] = lambda: False) -> None:
        """`deliver` takes every event, on the loop; the core's commands come back through `send` and `hang_up`. While
        `answers()` is true, heartbeats are answered here; otherwise the core answers them."""
        self._token = cluster_token.encode()
        self._deliver = deliver
        self._answers = answers
        self._links: dict[ev.LinkId, Link] = {}
        self._count = 0

    def send(self, link_id: ev.LinkId, message: link_pb2.RouterMessage) -> None:
        """Queue a command. Nothing happens for a link that has gone, because an event tells the core of that."""
        link = self._links.get(link_id)
        if link is not None:
            link.send(message)

    def hang_up(self, link_id: ev.LinkId, error: PdserveError) -> None:
        """Close a link. Nothing happens for a link that has gone."""
        link = self._links.get(link_id)
        if link is not None:
            link.close(error)

    async def Connect(self, request_iterator: Any, context: Any) -> None:
        await self._authenticate(context)
        numbers = Incoming()
        hello, bundles = await self._hello(context, numbers)
        self._count += 1
        link = Link(ev.LinkId(self._count), f"{hello.role.value} worker {hello.worker_id}", numbers, bundles=bundles)

        self._links[link.link_id] = link
        try:
            # The metadata is sent alone, because a refusal could not be sent while a first message carries it.
            await context.send_initial_metadata(())
            self._deliver(ev.WorkerJoined(link.link_id, hello))
            logger.info("link %d: %s at %s", link.link_id, link.worker, hello.address)
            await link.run(context, self._deliver, self._answers)
        except (InternalBug, ReplicaLost) as exc:
            link.close(exc)
        finally:  # a lost connection cancels this call
            del self._links[link.link_id]
            self._deliver(ev.WorkerLeft(link.link_id))
            reason = link.error.message if link.error is not None else link.last_word
            logger.warning("link %d: %s at %s ended: %s", link.link_id, link.worker, hello.address, reason)

        if link.error is not None:
            await status.abort(context, link.error)

    async def _authenticate(self, context: Any) -> None:
        given = dict(context.invocation_metadata() or ()).get(status.CLUSTER_TOKEN_METADATA, "")
        given = given if isinstance(given, bytes) else given.encode()
        if not hmac.compare_digest(given, self._token):
            logger.warning("refused a link from %s: wrong cluster token", context.peer())
            with contextlib.suppress(TimeoutError):  # gRPC would report an internal error for a Hello that meets the refusal
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    await context.read()
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{status.CLUSTER_TOKEN_METADATA} does not match")

    async def _hello(self, context: Any, numbers: Incoming) -> tuple[WorkerHello, bool]:
        """Return the Hello, and True if the worker takes bundles. Aborts the call unless the first message is a Hello."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message = await context.read()
        except TimeoutError:
            message = None
        if not isinstance(message, link_pb2.WorkerMessage) or message.WhichOneof("body") != "hello":
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"the first message must be Hello, and must come within {HELLO_TIMEOUT_S} s"
            )
        try:
            numbers.is_new(message.number)
            return hello_from_wire(message.hello), message.takes_bundles
        except (InternalBug, ReplicaLost) as exc:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, exc.message)
            raise
