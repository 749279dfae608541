"""The worker's end of the link: one stream to the router. The worker dials it, and dials again for ever.

A stream that breaks is taken up again with a new one, if the router's version can do that: each side sends what the other
lacks, and nothing is lost. When the router does not take it up within `router_lost_s`, or has given the worker up, the link is
lost: the router has dropped all requests that it had placed here, so the worker drops them too. A silent router, or a gap in
its message numbers, breaks the stream in the same way. All messages of the worker go through one bounded queue in order. If the
router does not read for so long that the queue fills, the worker gives the link up instead of using more memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn

import grpc

from pdserve.core.errors import ReplicaLost
from pdserve.core.worker import LINK_VERSIONS, RESUME_LINK_VERSION
from pdserve.rpc.beats import KEY_BYTES, Beats, Silence
from pdserve.rpc.bundle import Incoming, Outbound, unbundled
from pdserve.rpc.channel import open_channel, token_metadata
from pdserve.rpc.status import REASON_METADATA
from pdserve.rpc.v1 import common_pb2, link_pb2, link_pb2_grpc

log = logging.getLogger(__name__)

Stream = grpc.aio.StreamStreamCall[link_pb2.WorkerMessage, link_pb2.RouterMessage]

MAX_OUTBOUND: Final = 8192
REDIAL_FIRST_S: Final = 0.1
REDIAL_MAX_S: Final = 2.0  # a restarted router is found again within two heartbeats
MAX_FRUITLESS: Final = 3
"""A link is lost when so many streams in a row were taken up again and broke before anything came. What breaks them is then
what is sent."""
FINAL_CODES: Final = frozenset(
    {
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""With these codes a router says that it does not take a stream up again."""

MakeBeats = Callable[[str, bytes, float], Beats]


class RouterLink:
    """The link of one worker, which its loop owns. `on_command` gets each message of the router except Welcome and Alive.
    `on_lost` is called after each loss of a link that had been welcomed, and `after_beat` after each heartbeat. `on_welcome`
    gets the version of the link's protocol that both sides speak on the new link. `make_beats` starts the beats beside the
    stream; None: there are none."""

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
        make_beats: MakeBeats | None = Beats,
    ) -> None:
        self._router_address = router_address
        self._metadata = token_metadata(cluster_token)
        self._hello = hello
        self._heartbeat = heartbeat
        self._heartbeat_interval_s = heartbeat_interval_s
        self._router_lost_s = router_lost_s
        self._on_command = on_command
        self._on_lost = on_lost
        self._after_beat = after_beat
        self._on_welcome = on_welcome
        self._told_unknown = False  # on this link
        self._open_channel = open_channel
        self._make_beats = make_beats
        self._key = b""  # of this link; empty: it is not taken up again
        self._beats: Beats | None = None
        self._incoming = Incoming()
        self._outbound: Outbound[link_pb2.WorkerMessage] | None = None
        self._silence = self._new_silence()
        self._overflow = asyncio.Event()
        self._sent = self._answers = 0  # heartbeats of this link and answers to them
        self._answered = asyncio.Event()
        self._flows = asyncio.Event()  # the router has taken the stream
        self._fruitless = 0  # streams in a row that were taken up again and on which nothing came
        self.streams_resumed = 0
        """The streams that broke and were taken up again, in all."""
        self.connected = asyncio.Event()

    def _new_silence(self) -> Silence:
        return Silence(lost_s=self._router_lost_s, due_s=self._heartbeat_interval_s)

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
        asked = self._sent
        try:
            async with asyncio.timeout(self._router_lost_s):
                while self.connected.is_set() and self._answers and self._answers < asked <= self._sent:
                    self._answered.clear()
                    await self._answered.wait()
        except TimeoutError:
            log.warning("the router did not answer within %.1f s", self._router_lost_s)

    async def run(self) -> None:
        """Dial, serve, and dial again with bounded back-off, until cancelled."""
        pause_s = REDIAL_FIRST_S
        while True:
            try:
                reason = await self._serve()
            finally:
                self._outbound = None
                if self._beats is not None:
                    self._beats.close()
                    self._beats = None
            event = "lost" if self.connected.is_set() else "not made"
            log.warning("link to router %s %s: %s", self._router_address, event, reason)
            if self.connected.is_set():
                pause_s = REDIAL_FIRST_S
                self.connected.clear()
                self._answered.set()  # wakes `settle`, which looks again
                self._on_lost()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, REDIAL_MAX_S)

    async def _serve(self) -> str:
        """Serve one link, on one stream after the other. Return why it is lost."""
        self._key = b""
        self._incoming = Incoming()
        self._outbound = Outbound(MAX_OUTBOUND, self._incoming)
        self._overflow.clear()
        self._sent = self._answers = self._fruitless = 0
        self._told_unknown = False
        self._outbound.put(link_pb2.WorkerMessage(hello=self._hello(), takes_bundles=True))
        reason, final = await self._serve_stream(None, self._router_lost_s)
        while not final and self._key and self._fruitless < MAX_FRUITLESS:
            log.warning("the stream to router %s broke, and is taken up again: %s", self._router_address, reason)
            self._fruitless += 1
            reason, final = await self._take_up()
        return reason

    async def _take_up(self) -> tuple[str, bool]:
        """Dial until the router takes up the stream, and serve the new one until it breaks. Return as `_serve_stream` does; it
        is final as well when the router has not taken it up within `router_lost_s`."""
        loop = asyncio.get_running_loop()
        until_s, pause_s = loop.time() + self._router_lost_s, 0.0
        while True:
            resume = link_pb2.WorkerMessage(resume=link_pb2.Resume(link_key=self._key), received=self._incoming.last)
            reason, final = await self._serve_stream(resume, until_s - loop.time())
            if final or self._flows.is_set():
                return reason, final
            pause_s = min(2 * pause_s or REDIAL_FIRST_S, REDIAL_MAX_S)
            if loop.time() + pause_s >= until_s:
                return reason, True
            await asyncio.sleep(pause_s)

    async def _serve_stream(self, resume: link_pb2.WorkerMessage | None, limit_s: float) -> tuple[str, bool]:
        """Serve one stream until it breaks; the router must have taken it within `limit_s`. Return why it broke, and True if
        the link is not to be taken up again."""
        try:
            await self._serve_once(resume, limit_s)
        except grpc.aio.AioRpcError as exc:
            trailing: Any = exc.trailing_metadata()
            said = any(key == REASON_METADATA for key, _ in trailing or ())
            return exc.details() or exc.code().name, said or exc.code() in FINAL_CODES
        except (ConnectionError, ReplicaLost) as exc:
            return str(exc), self._overflow.is_set()

    async def _serve_once(self, resume: link_pb2.WorkerMessage | None, limit_s: float) -> NoReturn:
        """Open one stream and serve it until it breaks. Raises the error that ended it."""
        outbound = self._outbound
        assert outbound is not None
        self._silence = self._new_silence()
        if resume is None:
            self._flows.set()
        else:
            self._flows.clear()
        async with self._open_channel(self._router_address) as channel:
            call = link_pb2_grpc.WorkerLinkStub(channel).Connect(metadata=self._metadata)
            # A task of ours writes: for a request iterator, grpc.aio makes a task and leaks it when the stream breaks.
            writing = asyncio.create_task(self._write(call, outbound, resume))
            reading = self._read(call, outbound)
            ends: list[asyncio.Task[NoReturn]] = [
                asyncio.create_task(job) for job in (reading, self._beat(limit_s), self._end_on_overflow())
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
        raise AssertionError("a stream ends with an error")

    async def _read(self, call: Stream, outbound: Outbound[link_pb2.WorkerMessage]) -> NoReturn:
        async for message in call:
            self._silence.heard()
            if self._incoming.is_new(message.number):
                outbound.confirm(message.received)
                for one in self._parts(message):
                    self._take(one, message.received, outbound)
                self._fruitless = 0 if message.number else self._fruitless
        raise ConnectionError("the router closed the stream")

    def _parts(self, message: link_pb2.RouterMessage) -> Sequence[link_pb2.RouterMessage]:
        """Return the messages of a bundle. A bundle that cannot be read ends the link, since it would come again as it is."""
        try:
            return unbundled(message)
        except ReplicaLost:
            self._key = b""
            raise

    def _take(self, message: link_pb2.RouterMessage, received: int, outbound: Outbound[link_pb2.WorkerMessage]) -> None:
        body = message.WhichOneof("body")
        if body == "alive":
            self._answers += 1
            self._answered.set()
        elif body == "welcome":
            outbound.bundles = message.takes_bundles  # also of a Welcome that came in a bundle itself
            self._take_welcome(message.welcome, outbound)
        elif body == "resumed":
            self._take_resumed(received, outbound)
        elif body is None:
            self._take_unknown()
        else:
            self._on_command(message)

    def _take_welcome(self, welcome: link_pb2.Welcome, outbound: Outbound[link_pb2.WorkerMessage]) -> None:
        """Begin to serve. Raises ConnectionError if this worker does not speak the router's version of the link's protocol."""
        if not LINK_VERSIONS.oldest <= welcome.link_version <= LINK_VERSIONS.newest:
            raise ConnectionError(
                f"the router speaks version {welcome.link_version} of the link's protocol, this worker speaks {LINK_VERSIONS}: "
                "upgrade the older one of the two"
            )
        router = f"{self._router_address}, incarnation {welcome.router_incarnation:016x}"
        log.info("linked to router %s, version %d of the link's protocol", router, welcome.link_version)
        if welcome.link_version >= RESUME_LINK_VERSION and len(welcome.link_key) == KEY_BYTES:
            self._key = welcome.link_key
            outbound.keep()
            if self._make_beats is not None:
                self._beats = self._make_beats(self._router_address, self._key, self._heartbeat_interval_s)
        self._on_welcome(welcome.link_version)
        self.connected.set()

    def _take_resumed(self, received: int, outbound: Outbound[link_pb2.WorkerMessage]) -> None:
        """Go on where the router stopped. Raises `ReplicaLost` when what it lacks is not kept."""
        try:
            outbound.again(received)
        except ReplicaLost:
            self._key = b""
            raise
        self.streams_resumed += 1
        self._flows.set()
        log.warning("the stream to router %s goes on", self._router_address)

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

    async def _write(
        self, call: Stream, outbound: Outbound[link_pb2.WorkerMessage], resume: link_pb2.WorkerMessage | None
    ) -> None:
        """Write queued messages until the stream ends. The task that reads the stream raises the reason of its end."""
        if resume is not None:
            await call.write(resume)
            await self._flows.wait()  # only then it is known what the router lacks
        while True:
            await call.write(await outbound.next())

    def _send_beat(self) -> None:
        self._sent += 1
        self.send(link_pb2.WorkerMessage(heartbeat=self._heartbeat()))
        self._after_beat()

    async def _beat(self, limit_s: float) -> NoReturn:
        """Send heartbeats once the router has taken the stream. Raises ConnectionError when it does not do that within
        `limit_s`, and when it is lost by its silence.

        No heartbeat goes out before Welcome: if the router refuses the stream, gRPC turns a concurrent write into an internal
        error, which hides the reason.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):  # `wait_for` loses a cancellation that comes with the Welcome
                await self.connected.wait()
                await self._flows.wait()
        except TimeoutError:
            raise ConnectionError(f"the router has not answered Hello for {limit_s:.1f} s") from None
        while True:
            self._send_beat()
            looked_s = loop.time()
            await asyncio.sleep(self._heartbeat_interval_s)
            beats = 0
            if self._beats is not None:
                self._beats.turned()
                beats = self._beats.answers
            lost = self._silence.look(loop.time() - looked_s, beats)
            if lost and self._answers:
                raise ConnectionError(f"the router is silent: {lost}")

    async def _end_on_overflow(self) -> NoReturn:
        await self._overflow.wait()
        raise ConnectionError(f"the router reads too slowly: {MAX_OUTBOUND} messages are waiting")
