"""The worker's end of the link: one stream to the router. The worker dials it, and dials again for ever.

When the stream is lost, the router drops all requests that it had placed here, so the worker drops them too. A stream cannot
be resumed: the router replays lost requests on other workers without any state from here, while to resume, both sides would
have to keep all messages that the other may not have got. A router that answers no heartbeat, or a gap in its message
numbers, ends the stream in the same way. All messages of the worker go through one bounded queue in order. If the router
does not read for so long that the queue fills, the worker ends the stream instead of using more memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, NoReturn

import grpc

from pdserve.core.errors import ReplicaLost
from pdserve.core.worker import LINK_VERSIONS
from pdserve.rpc.bundle import Outbound, unbundled
from pdserve.rpc.channel import open_channel, token_metadata
from pdserve.rpc.numbering import Incoming
from pdserve.rpc.v1 import common_pb2, link_pb2, link_pb2_grpc

log = logging.getLogger(__name__)

Stream = grpc.aio.StreamStreamCall[link_pb2.WorkerMessage, link_pb2.RouterMessage]

MAX_OUTBOUND: Final = 8192
REDIAL_FIRST_S: Final = 0.1
REDIAL_MAX_S: Final = 2.0  # a restarted router is found again within two heartbeats


class Link:
    """The link of one worker, which its loop owns. `on_command` gets each message of the router except Welcome and Alive.
    `on_lost` is called after each loss of a stream that had been welcomed, and `after_beat` after each heartbeat. `on_welcome`
    gets the version of the link's protocol that both sides speak on the new stream."""

    def __init__(
        self,
        router_address: str,
        cluster_token: str,
        hello: Callable[[], common_pb2.WorkerHello],
        heartbeat: Callable[[], common_pb2.WorkerLoad],
        *,
        heartbeat_interval_s: float,
        router_lost_s: float,
        on_command: Callable[[link_pb2.RouterMessage], None],
        on_lost: Callable[[], None],
        after_beat: Callable[[], None] = lambda: None,
        on_welcome: Callable[[int], None] = lambda version: None,
        open_channel: Callable[[str], grpc.aio.Channel] = open_channel,
    ) -> None:
        self._router_address = router_address
        self._metadata = token_metadata(cluster_token)
        self._hello = hello
        self._heartbeat = heartbeat
        self._heartbeat_interval_s = heartbeat_interval_s
        self._router_lost_s = router_lost_s
        self._heard_s: float | None = None  # last answer to a heartbeat on this stream; None: there was none
        self._on_command = on_command
        self._on_lost = on_lost
        self._after_beat = after_beat
        self._on_welcome = on_welcome
        self._told_unknown = False  # on this stream
        self._open_channel = open_channel
        self._outbound: Outbound[link_pb2.WorkerMessage] | None = None
        self._overflow = asyncio.Event()
        self._beats = self._answers = 0  # of this stream
        self._answered = asyncio.Event()
        self.connected = asyncio.Event()

    def send(self, message: link_pb2.WorkerMessage) -> None:
        """Queue a message. Without a stream it is dropped, since nobody waits for it any more."""
        if self._outbound is None:
            return
        try:
            self._outbound.put(message)
        except asyncio.QueueFull:
            self._overflow.set()

    def beat_now(self) -> None:
        """Send a heartbeat now if the link is connected."""
        if self.connected.is_set():
            self._send_beat()

    async def settle(self) -> None:
        """Return once the router has got all messages that were sent so far, or may be lost.

        A stream keeps its order, so the answer to a heartbeat also confirms all messages before it. A worker that ends without
        this answer could lose a last token.
        """
        self.beat_now()
        asked = self._beats
        try:
            async with asyncio.timeout(self._router_lost_s):
                while self.connected.is_set() and self._heard_s is not None and self._answers < asked <= self._beats:
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            log.warning("the router did not answer within %.1f s", self._router_lost_s)

    async def run(self) -> None:
        """Dial, serve, and dial again with bounded back-off, until cancelled."""
        pause_s = REDIAL_FIRST_S
        while True:
            try:
                await self._serve_once()
            except (grpc.aio.AioRpcError, ConnectionError, ReplicaLost) as exc:
                reason = exc.details() if isinstance(exc, grpc.aio.AioRpcError) else str(exc)
                event = "lost" if self.connected.is_set() else "not made"
                log.warning("link to router %s %s: %s", self._router_address, event, reason)
            if self.connected.is_set():
                pause_s = REDIAL_FIRST_S
                self.connected.clear()
                self._answered.set()  # wakes `settle`, which looks again
                self._on_lost()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, REDIAL_MAX_S)

    async def _serve_once(self) -> None:
        """Open one stream and serve it until it breaks. Raises the error that ended it."""
        self._outbound = Outbound(MAX_OUTBOUND)
        self._overflow.clear()
        self._heard_s = None
        self._beats = self._answers = 0
        self._told_unknown = False
        self._outbound.put(link_pb2.WorkerMessage(hello=self._hello(), takes_bundles=True))
        try:
            async with self._open_channel(self._router_address) as channel:
                call = link_pb2_grpc.WorkerLinkStub(channel).Connect(metadata=self._metadata)
                # A task of ours writes: for a request iterator, grpc.aio makes a task and leaks it when the stream breaks.
                writing = asyncio.create_task(self._write(call, self._outbound))
                reading = self._read(call, self._outbound)
                ends: list[asyncio.Task[NoReturn]] = [
                    asyncio.create_task(job) for job in (reading, self._beat(), self._end_on_overflow())
                ]
                try:
                    done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                    for end in done:
                        end.result()  # always raises: none of these tasks ends without an error
                finally:
                    writing.cancel()
                    for end in ends:
                        end.cancel()
                    await asyncio.gather(writing, *ends, return_exceptions=True)
                    call.cancel()
        finally:
            self._outbound = None

    async def _read(self, call: Stream, outbound: Outbound[link_pb2.WorkerMessage]) -> NoReturn:
        numbers = Incoming()
        async for message in call:
            if numbers.is_new(message.number):
                outbound.bundles = outbound.bundles or message.takes_bundles
                for one in unbundled(message):
                    self._take(one)
        raise ConnectionError("the router closed the stream")

    def _take(self, message: link_pb2.RouterMessage) -> None:
        body = message.WhichOneof("body")
        if body == "alive":
            self._heard_s = asyncio.get_running_loop().time()
            self._answers += 1
            self._answered.set()
        elif body == "welcome":
            self._take_welcome(message.welcome)
        elif body is None:
            self._take_unknown()
        else:
            self._on_command(message)

    def _take_welcome(self, welcome: link_pb2.Welcome) -> None:
        """Begin to serve. Raises ConnectionError if this worker does not speak the router's version of the link's protocol."""
        if not LINK_VERSIONS.oldest <= welcome.link_version <= LINK_VERSIONS.newest:
            raise ConnectionError(
                f"the router speaks version {welcome.link_version} of the link's protocol, this worker speaks {LINK_VERSIONS}: "
                "upgrade the older one of the two"
            )
        router = f"{self._router_address}, incarnation {welcome.router_incarnation:016x}"
        log.info("linked to router %s, version %d of the link's protocol", router, welcome.link_version)
        self._on_welcome(welcome.link_version)
        self.connected.set()

    def _take_unknown(self) -> None:
        """Log, once for each stream, that the router sent a message that this release does not know."""
        if not self._told_unknown:
            self._told_unknown = True
            log.error(
                "router %s sent a message that this worker does not know, which speaks version %s of the link's protocol: "
                "nothing was done; upgrade this worker",
                self._router_address,
                LINK_VERSIONS,
            )

    async def _write(self, call: Stream, outbound: Outbound[link_pb2.WorkerMessage]) -> None:
        """Write queued messages until the stream ends. The task that reads the stream raises the reason of its end."""
        while True:
            await call.write(await outbound.next())

    def _send_beat(self) -> None:
        self._beats += 1
        self.send(link_pb2.WorkerMessage(heartbeat=self._heartbeat()))
        self._after_beat()

    async def _beat(self) -> NoReturn:
        """Send heartbeats from Welcome on. Raises ConnectionError when none was answered for `router_lost_s`.

        A process that was itself stopped waits one more interval for an answer first. No heartbeat goes out before Welcome: if
        the router refuses the stream, gRPC turns a concurrent write into an internal error, which hides the reason.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._router_lost_s):  # `wait_for` loses a cancellation that comes with the Welcome
                await self.connected.wait()
        except TimeoutError:
            raise ConnectionError(f"the router has not answered Hello for {self._router_lost_s:.1f} s") from None
        late = False
        while True:
            self._send_beat()
            due_s = loop.time() + self._heartbeat_interval_s
            await asyncio.sleep(self._heartbeat_interval_s)
            late = not late and loop.time() - due_s > self._heartbeat_interval_s
            if not late and self._heard_s is not None and loop.time() - self._heard_s > self._router_lost_s:
                raise ConnectionError(f"the router has answered no heartbeat for {self._router_lost_s:.1f} s")

    async def _end_on_overflow(self) -> NoReturn:
        await self._overflow.wait()
        raise ConnectionError(f"the router reads too slowly: {MAX_OUTBOUND} messages are waiting")
