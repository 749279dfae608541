"""The link service. Workers dial in, each on one long-lived stream. The service owns the connections and knows nothing of
requests.

A link is closed when its worker breaks the protocol, when its outbound queue overflows because the worker does not read, or
when the core asks for it (the worker is refused, lost, or has dialled again). Whatever the reason, the core hears WorkerLeft.

A stream that breaks, also because a message was lost, does not end its link yet, if both ends speak a version that can take it
up again: the worker may come back and go on, while its process lives and the core has not given it up. The core hears nothing
of that.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hmac
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import grpc.aio
import uvloop

from pdserve.core.errors import ConfigError, InternalBug, Overloaded, PdserveError, ReplicaLost, Unavailable
from pdserve.core.worker import LINK_VERSIONS, RESUME_LINK_VERSION, WorkerHello
from pdserve.rpc import status
from pdserve.rpc.beats import KEY_BYTES, STUCK_S
from pdserve.rpc.bundle import Incoming, Outbound, unbundled
from pdserve.rpc.server import bind_port, client_options, make_server, stop_server
from pdserve.rpc.v1 import link_pb2, link_pb2_grpc
from pdserve.rpc.witness import ended
from router.core import events as ev
from router.workers.beat_port import BeatPort
from router.workers.wire import Heard, event_from_wire, hello_from_wire

logger = logging.getLogger(__name__)

HELLO_TIMEOUT_S: Final = 5.0
MAX_OUTBOUND: Final = 4096
"""The most commands that wait to be written to one worker: several for each request that it could hold."""

RETURN_S: Final = 5.0  # the default of `router.heartbeat_lost_s`
ROOM_S: Final = 0.25  # how often a stream looks for room; the loop that takes events has seconds of work then
GONE: Final = "the router has no such link any more"

Deliver = Callable[[Heard], None]
HasRoom = Callable[[ev.LinkId], bool]
Ended = Callable[[str], Awaitable[None]]
"""Returns once the process of an address is known to have ended, and otherwise not at all."""


class Links(Protocol):
    """The core's way to workers. A call for a link that has gone does nothing, because an event tells the core that the link
    has gone."""

    def send(self, link_id: ev.LinkId, message: link_pb2.RouterMessage) -> None:
        """Queue a command."""

    def hang_up(self, link_id: ev.LinkId, error: PdserveError) -> None:
        """Close a link. The error tells the worker why."""

    def take_alive(self) -> tuple[ev.LinkId, ...]:
        """Return the links whose workers have shown since the last call that they live, other than by delivered events."""


class Link:
    """The connection of one worker: one stream, or several streams in a row if the worker takes a broken link up again.
    Commands keep their order."""

    def __init__(self, link_id: ev.LinkId, hello: WorkerHello, incoming: Incoming, *, bundles: bool) -> None:
        self.link_id = link_id
        self.worker = f"{hello.role.value} worker {hello.worker_id}"
        self.address = hello.address
        self.error: PdserveError | None = None
        self.outbound: Outbound[link_pb2.RouterMessage] = Outbound(MAX_OUTBOUND, incoming)
        self.outbound.bundles = bundles
        self.incoming = incoming
        self.closed = asyncio.Event()
        self._replaced = asyncio.Event()
        self.streams = asyncio.Lock()
        """The holder of this lock serves the single stream of this link."""
        self._told_unknown = False
        self.key = b""
        """The link's key. Empty: the worker has not been welcomed, or its version has no beats and takes nothing up again."""
        self.word = ""
        """Why the worker ends, in its own words. The worker may be gone before the core gets these words and closes the
        link."""
        self.broken = False
        """True while the stream is broken and the worker has not come back."""
        self.waiting: asyncio.Task[None] | None = None
        """The wait for the worker's return, while the stream is broken."""

    @property
    def outlives_stream(self) -> bool:
        """True if the worker may take this link up again after its stream has broken."""
        return bool(self.key) and not self.word and not self.closed.is_set()

    def send(self, message: link_pb2.RouterMessage) -> None:
        """Queue a command. A full queue closes the link, because its worker does not read."""
        try:
            self.outbound.put(message)
        except asyncio.QueueFull:
            error = Overloaded(f"{self.worker} does not read: {MAX_OUTBOUND} commands wait", retry_after_s=1.0)
            self.close(error)

    def close(self, error: PdserveError) -> None:
        """Close the link. The worker gets the first error."""
        self.error = self.error or error
        self.closed.set()

    def replace_stream(self) -> asyncio.Event:
        """Begin a stream that serves this link from now on: its worker has dialled again. The previous stream ends. Returns the
        event that will end the new stream in the same way."""
        self._replaced.set()
        self._replaced = asyncio.Event()
        return self._replaced

    async def run(
        self, context: Any, replaced: asyncio.Event, deliver: Deliver, answers: Callable[[], bool], has_room: HasRoom
    ) -> None:
        """Read and write until the worker hangs up, the link is closed, another stream replaces this one, or either direction
        breaks. While `answers()`, heartbeats are answered here."""
        jobs = (self._read(context, deliver, answers, has_room), self._write(context), self.closed.wait(), replaced.wait())
        tasks = [asyncio.ensure_future(job) for job in jobs]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, context: Any, deliver: Deliver, answers: Callable[[], bool], has_room: HasRoom) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # not in the stubs
            # The worker's next messages wait in the stream.
            while not has_room(self.link_id):  # noqa: ASYNC110 - room is made on another loop
                await asyncio.sleep(ROOM_S)
            if not message.number and message.HasField("resume"):
                continue  # the first message came twice
            if self.incoming.is_new(message.number):
                self.outbound.confirm(message.received)
                for one in self._parts(message):
                    self._hear(one, deliver, answers)

    def _parts(self, message: link_pb2.WorkerMessage) -> Sequence[link_pb2.WorkerMessage]:
        """Return the messages of a bundle. An unreadable bundle ends the link, since the worker would send the same bytes
        again."""
        try:
            return unbundled(message)
        except ReplicaLost as exc:
            self.close(exc)
            raise

    def _hear(self, message: link_pb2.WorkerMessage, deliver: Deliver, answers: Callable[[], bool]) -> None:
        event = event_from_wire(self.link_id, message)
        if type(event) is ev.WorkerLost:
            self.word = event.message
        if event is None:
            self._hear_unknown()
        elif not self.closed.is_set():
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
            await context.write(await self.outbound.next())


class LinkService(link_pb2_grpc.WorkerLinkServicer):
    """The gRPC service that workers dial."""

    def __init__(
        self,
        cluster_token: str,
        deliver: Deliver,
        answers: Callable[[], bool] = lambda: False,
        *,
        has_room: HasRoom = lambda link: True,
        return_s: float = RETURN_S,
        beats: BeatPort | None = None,
        ended: Ended = ended,
        draw_key: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """`deliver` takes every event, on the loop; the core's commands come back through `send` and `hang_up`. While
        `answers()` is true, heartbeats are answered here; otherwise the core answers them. While `has_room` says that there is
        no room for more events of a link, its stream is not read.

        A worker whose stream broke may come back within `return_s`, unless `ended` finds that its process has ended. `beats`
        receives beats of the links beside their streams; None: no beats are received.
        """
        self._token = cluster_token.encode()
        self._deliver = deliver
        self._answers = answers
        self._has_room = has_room
        self._return_s = return_s
        self._beats = beats
        self._ended = ended
        self._draw_key = draw_key
        self._links: dict[ev.LinkId, Link] = {}
        self._by_key: dict[bytes, Link] = {}
        self._count = 0

    def send(self, link_id: ev.LinkId, message: link_pb2.RouterMessage) -> None:
        """Queue a command. Nothing happens for a link that has gone, because an event tells the core of that."""
        link = self._links.get(link_id)
        if link is not None:
            if not link.key and message.welcome.link_version >= RESUME_LINK_VERSION:
                self._name(link, message.welcome)
            link.send(message)

    def _name(self, link: Link, welcome: link_pb2.Welcome) -> None:
        """Give a link that is welcomed its key."""
        welcome.link_key = link.key = self._draw_key(KEY_BYTES)
        self._by_key[link.key] = link
        link.outbound.keep()
        if self._beats is not None:
            self._beats.add(link.key, link.link_id)

    def hang_up(self, link_id: ev.LinkId, error: PdserveError) -> None:
        """Close a link. Nothing happens for a link that has gone."""
        link = self._links.get(link_id)
        if link is not None:
            link.close(error)

    def take_alive(self) -> tuple[ev.LinkId, ...]:
        """Return the links that have beaten since the last call."""
        return () if self._beats is None else tuple(sorted(self._beats.take()))

    async def close(self) -> None:
        """End the links whose workers may still come back. Call it after the server has stopped."""
        waiting = [link.waiting for link in self._links.values() if link.waiting is not None]
        for link in list(self._links.values()):
            link.close(Unavailable("the router is stopping"))
        await asyncio.gather(*waiting, return_exceptions=True)

    async def Connect(self, request_iterator: Any, context: Any) -> None:
        await self._authenticate(context)
        first = await self._first(context)
        if first.WhichOneof("body") == "resume":
            await self._resume(first, context)
            return
        incoming = Incoming()
        hello = await self._hello(first, incoming, context)
        self._count += 1
        link = Link(ev.LinkId(self._count), hello, incoming, bundles=first.takes_bundles)
        self._links[link.link_id] = link
        replaced = link.replace_stream()
        async with link.streams:
            broke = await self._serve(link, context, replaced, lambda: self._deliver(ev.WorkerJoined(link.link_id, hello)))
        await self._tell_end(link, context, broke)

    async def _resume(self, first: link_pb2.WorkerMessage, context: Any) -> None:
        """Go on with a link whose stream broke, from where each side stopped. The core hears nothing of it."""
        link = self._by_key.get(first.resume.link_key)
        if link is None or not link.outlives_stream:
            await context.abort(grpc.StatusCode.NOT_FOUND, GONE)
            return
        loop = asyncio.get_running_loop()
        replaced = link.replace_stream()
        async with contextlib.AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(link.streams)
            except BaseException:  # a lost connection cancels this call, while the stream before has not ended yet
                self._leave(link, loop, replaced, "the worker hung up or died while it took the link up")
                raise
            if not link.outlives_stream:  # the link was closed in the meantime
                self._end(link)
                await status.abort(context, link.error or ReplicaLost(GONE))
            link.broken = False
            if link.waiting is not None:
                link.waiting.cancel()
                link.waiting = None
            try:
                link.outbound.again(first.received)
            except ReplicaLost as exc:
                link.close(exc)
            broke = await self._serve(link, context, replaced, lambda: self._go_on(link), self._resumed(link))
        await self._tell_end(link, context, broke)

    def _go_on(self, link: Link) -> None:
        logger.info("link %d: %s goes on with a new stream", link.link_id, link.worker)
        if self._beats is not None:
            self._beats.add(link.key, link.link_id)

    def _resumed(self, link: Link) -> link_pb2.RouterMessage:
        return link_pb2.RouterMessage(resumed=link_pb2.Resumed(), received=link.incoming.last)

    async def _serve(
        self,
        link: Link,
        context: Any,
        replaced: asyncio.Event,
        begin: Callable[[], None],
        first: link_pb2.RouterMessage | None = None,
    ) -> str:
        """Serve one stream of a link. Then the link ends, or waits for the worker's return. Return why the stream ended."""
        loop = asyncio.get_running_loop()
        broke = "the worker hung up or died"
        try:
            # The metadata is sent alone, because a refusal could not be sent while a first message carries it.
            await context.send_initial_metadata(())
            begin()
            if first is not None:
                await context.write(first)
            await link.run(context, replaced, self._deliver, self._answers, self._has_room)
        except ReplicaLost as exc:
            broke = exc.message
            if not link.outlives_stream:
                link.close(exc)
        except InternalBug as exc:
            link.close(exc)
        finally:  # a lost connection cancels this call
            self._leave(link, loop, replaced, broke)
        return broke

    async def _tell_end(self, link: Link, context: Any, broke: str) -> None:
        """Write the status of a stream that has ended. The next stream does not wait for that: the status stands behind
        messages that the worker's side has not read, and on a dead connection that may take as long as the connection lasts."""
        if link.error is not None:
            await status.abort(context, link.error)
        if link.outlives_stream:
            await context.abort(grpc.StatusCode.UNAVAILABLE, broke)

    def _leave(self, link: Link, loop: asyncio.AbstractEventLoop, replaced: asyncio.Event, broke: str) -> None:
        """End a link whose stream has ended, or wait for the worker's return. If the stream was replaced, its successor serves
        the link, and does this at its own end."""
        if not link.outlives_stream or not _runs(loop):
            self._end(link)
        elif not replaced.is_set():
            self._wait_for(link, broke)

    def _wait_for(self, link: Link, broke: str) -> None:
        """Let the worker come back, while nothing shows that its process has ended. Its beats are not received in this time, so
        after a while the core gives it no new work, and at last gives it up."""
        logger.warning("link %d: the stream of %s at %s broke: %s", link.link_id, link.worker, link.address, broke)
        if self._beats is not None:
            self._beats.discard(link.key)
        link.broken = True
        asyncio.get_running_loop().call_soon(self._begin_to_wait, link)  # a dropped loop begins no task

    def _begin_to_wait(self, link: Link) -> None:
        if link.broken and link.waiting is None:  # a stream that was never served leaves a wait as it was
            link.waiting = asyncio.create_task(self._outwait(link))

    async def _outwait(self, link: Link) -> None:
        ways = [asyncio.ensure_future(way) for way in (self._evidence(link), link.closed.wait())]
        try:
            await asyncio.wait(ways, timeout=self._return_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
        self._end(link)

    async def _evidence(self, link: Link) -> None:
        """Return once the worker's process is known to have ended. An error proves nothing, so the worker has its time."""
        try:
            await self._ended(link.address)
        except Exception:
            logger.exception("link %d: whether %s at %s has ended is not known", link.link_id, link.worker, link.address)
            await link.closed.wait()

    def _end(self, link: Link) -> None:
        """End a link for good, and tell the core. Idempotent."""
        link.closed.set()
        if self._beats is not None:
            self._beats.discard(link.key)
        if self._links.pop(link.link_id, None) is None:
            return
        self._by_key.pop(link.key, None)
        self._deliver(ev.WorkerLeft(link.link_id))
        reason = link.error.message if link.error is not None else link.word or "hung up or died"
        logger.warning("link %d: %s at %s ended: %s", link.link_id, link.worker, link.address, reason)

    async def _authenticate(self, context: Any) -> None:
        given = dict(context.invocation_metadata() or ()).get(status.CLUSTER_TOKEN_METADATA, "")
        given = given if isinstance(given, bytes) else given.encode()
        if not hmac.compare_digest(given, self._token):
            logger.warning("refused a link from %s: wrong cluster token", context.peer())
            with contextlib.suppress(TimeoutError):  # gRPC would report an internal error for a Hello that meets the refusal
                async with asyncio.timeout(HELLO_TIMEOUT_S):
                    await context.read()
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{status.CLUSTER_TOKEN_METADATA} does not match")

    async def _first(self, context: Any) -> link_pb2.WorkerMessage:
        """Return the first message. Aborts the call unless it comes in time."""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                message = await context.read()
        except TimeoutError:
            message = None
        if not isinstance(message, link_pb2.WorkerMessage) or message.WhichOneof("body") not in ("hello", "resume"):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"the first message must be Hello, and must come within {HELLO_TIMEOUT_S} s"
            )
        assert isinstance(message, link_pb2.WorkerMessage)  # `abort` raises
        return message

    async def _hello(self, message: link_pb2.WorkerMessage, incoming: Incoming, context: Any) -> WorkerHello:
        """Return the Hello. Aborts the call when it is broken."""
        try:
            incoming.is_new(message.number)
            return hello_from_wire(message.hello)
        except (InternalBug, ReplicaLost) as exc:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, exc.message)
            raise


def _runs(loop: asyncio.AbstractEventLoop) -> bool:
    """Tell whether this is called on a loop. A coroutine of a dropped loop ends wherever the interpreter collects it."""
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False


# The thread of links --------------------------------------------------------------------------------------------------
#
# Workers' links on a thread with a loop of its own, so that no flood of clients makes workers give up the router.
#
# The core stays on the main loop, with the front ends. Events reach the core in order through one queue, and a batch of them
# costs one wake-up. Commands reach the links in order as well, all those of a turn of the main loop together, so that they
# share a wake-up and travel as a bundle. Heartbeats and beats are answered here at once, as long as the main loop takes
# events. A main loop that has taken no events for `STUCK_S` hangs, and its workers should learn of it.


MAX_LINK_MESSAGE_BYTES: Final = 8 << 20
"""A larger message comes from a broken worker. The messages of a working worker have a bundle's bytes, 1 MiB, or little more.
Parsed garbage takes up to 8 times the bytes (measured with a bundle of empty messages), and blocks the interpreter
meanwhile."""
STREAM_WINDOW_BYTES: Final = 512
"""The most unread bytes of a worker's stream that are under way, besides the message that is being read. All other messages
wait on the worker's side, where they become bundles. By default gRPC let 22,000 messages of 40 bytes wait on the way
(measured). Under load the thread reads each link less than twice a second, so with 4 KiB a heartbeat stood behind 90 messages
for up to 45 s."""
MAX_HEARD: Final = 1 << 16
"""While this many events wait for the main loop, minutes of the steps of many workers, no stream is read. What workers send
meanwhile waits on their side: load must end no link."""
MAX_HEARD_OF_LINK: Final = 1 << 15
"""While the events of one link that wait have this weight, its stream is not read, so this weight bounds the delay that a
worker which sends without end causes to others. A working worker reaches half of it while the main loop stands still for
`STUCK_S`."""
PARTS_OF_WEIGHT: Final = 16  # rows or prefix keys of an event weigh as much as an event of their own
TAKEN_S: Final = 0.01
"""The longest time for which the main loop takes events without a break. Then other tasks have a turn, also while events come
faster than the loop takes them."""
MAX_SAID: Final = 64
"""The most commands that wait for the end of a turn of the main loop: the commands of about 5 ms of its work. With 16, the
links' thread took 47 us for each request when many requests came over HTTP together; now it takes 36 us."""
TURN_S: Final = 1.0  # how often the thread's loop notes that it turns
MAX_CONNECTIONS: Final = 1024  # one link for each worker; a router process passes the number that its descriptors allow
CLOSE_TIMEOUT_S: Final = 5.0  # longer than the grace of a server that stops


class LinkThread:
    """Serves workers' links. `start` it on the main loop, which calls all its methods, and `close` it."""

    def __init__(self, cluster_token: str, max_connections: int = MAX_CONNECTIONS, *, return_s: float = RETURN_S) -> None:
        """A worker whose stream broke may come back within `return_s`."""
        self._return_s = return_s
        self._token = cluster_token
        self._max_connections = max_connections
        self._heard: deque[Heard] = deque()
        self._heard_weight: Counter[ev.LinkId] = Counter()  # of all events of a link so far
        self._taken_weight: Counter[ev.LinkId] = Counter()  # of the events that the main loop has taken
        self._heard_since_s: float | None = None  # None: the main loop has not been woken for a batch
        self._said: list[Callable[[LinkService], None]] = []  # in this turn of the main loop
        self._main: asyncio.AbstractEventLoop | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # None: it does not run yet, or has ended
        self._service: LinkService | None = None
        self._stop: asyncio.Event | None = None
        self._beats = BeatPort(self._turns)
        self._turned_s = 0.0  # when the thread's loop last had a turn
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread: threading.Thread | None = None

    # On the main loop --------------------------------------------------------------------------------------------------

    async def start(self, deliver: Deliver, host: str, port: int, on_broken: Callable[[], object] = lambda: None) -> int:
        """Listen, and return the port. Raises `ConfigError` naming --link-port.

        `deliver` is called on this loop. `on_broken` is called if the thread ends because of a bug; then no worker can be
        reached.
        """
        assert self._thread is None
        self._deliver = deliver
        self._on_broken = on_broken
        self._main = asyncio.get_running_loop()
        ready: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, args=(host, port, ready), name="links", daemon=True)
        self._thread.start()
        return await asyncio.wrap_future(ready)

    async def close(self) -> None:
        """End all links. Bounded and idempotent."""
        self._pass_on()
        if self._loop is not None and self._stop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        if self._thread is not None:
            await asyncio.wait((asyncio.wrap_future(self._ended),), timeout=CLOSE_TIMEOUT_S)  # the thread logs how it ends
            self._thread.join(CLOSE_TIMEOUT_S)
            while self._heard:
                self._take_heard()

    def send(self, link_id: ev.LinkId, message: link_pb2.RouterMessage) -> None:
        """Queue a command for the thread. An Alive is left out, since the thread has answered the heartbeat itself."""
        if message.WhichOneof("body") != "alive":  # the thread answered the heartbeat when it came
            self._say(lambda service: service.send(link_id, message))

    def hang_up(self, link_id: ev.LinkId, error: PdserveError) -> None:
        """Ask the thread to close a link."""
        self._say(lambda service: service.hang_up(link_id, error))

    def take_alive(self) -> tuple[ev.LinkId, ...]:
        """Return the links that have beaten since the last call, and those whose events wait for this loop."""
        alive = self._beats.take()
        if self._heard:
            taken = self._taken_weight
            alive.update(link for link, weight in dict(self._heard_weight).items() if weight > taken.get(link, 0))
        return tuple(sorted(alive))

    def _say(self, act: Callable[[LinkService], None]) -> None:
        if self._loop is None:
            return
        assert self._main is not None
        if not self._said:
            self._main.call_soon(self._pass_on)  # after all that is ready to run now
        self._said.append(act)
        if len(self._said) == MAX_SAID:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._loop is not None and self._said:
            said, self._said = self._said, []
            with contextlib.suppress(RuntimeError):  # the thread has just ended
                self._loop.call_soon_threadsafe(self._take_said, said)

    def _take_heard(self) -> None:
        """Deliver events for `TAKEN_S`, and the remaining events in a later turn of this loop."""
        self._heard_since_s = None
        until_s = time.monotonic() + TAKEN_S
        while self._heard:
            if time.monotonic() > until_s:
                self._take_later()
                return
            event = self._heard.popleft()
            self._taken_weight[event.link] += _weight(event)
            if type(event) is ev.WorkerLeft:
                del self._taken_weight[event.link]
            try:
                self._deliver(event)
            except Exception:  # a bug of ours costs only this link, and events of other links are still taken
                logger.exception("link %d: the core failed on its %s", event.link, type(event).__name__)
                self.hang_up(event.link, InternalBug("the router failed on an event of this worker"))

    def _take_later(self) -> None:
        if self._heard_since_s is None and self._main is not None:  # otherwise the thread has asked for a turn already
            self._heard_since_s = time.monotonic()
            self._main.call_soon(self._take_heard)

    # On the thread -----------------------------------------------------------------------------------------------------

    def _run(self, host: str, port: int, ready: concurrent.futures.Future[int]) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._serve(host, port, ready))
            self._ended.set_result(None)
        except BaseException as exc:
            logger.critical("the thread of workers' links broke", exc_info=exc)
            self._ended.set_exception(exc)
            assert self._main is not None
            with contextlib.suppress(RuntimeError):  # the main loop has ended as well
                self._main.call_soon_threadsafe(self._on_broken)

    async def _serve(self, host: str, port: int, ready: concurrent.futures.Future[int]) -> None:
        self._stop = asyncio.Event()
        self._service = LinkService(
            self._token,
            self._hear,
            answers=self._main_takes,
            has_room=self._has_room,
            return_s=self._return_s,
            beats=self._beats,
        )
        window = [("grpc.http2.lookahead_bytes", STREAM_WINDOW_BYTES), ("grpc.http2.bdp_probe", 0)]  # the probe widens it
        options = [*client_options(self._max_connections), *window]
        server = make_server(max_receive_bytes=MAX_LINK_MESSAGE_BYTES, options=options)
        link_pb2_grpc.add_WorkerLinkServicer_to_server(self._service, server)
        try:
            bound = bind_port(server, host, port, "--link-port")
        except ConfigError as exc:
            ready.set_exception(exc)
            return
        await server.start()
        self._beats.open(host, bound)
        self._loop = asyncio.get_running_loop()
        ready.set_result(bound)
        try:
            while not self._stop.is_set():
                self._turned_s = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TURN_S):
                        await self._stop.wait()
        finally:
            self._loop = None
            self._beats.close()
            await stop_server(server)
            await self._service.close()

    def _hear(self, event: Heard) -> None:
        assert self._main is not None
        if type(event) is ev.WorkerLeft:
            self._heard_weight.pop(event.link, None)
        else:
            self._heard_weight[event.link] += _weight(event)
        self._heard.append(event)
        if self._heard_since_s is None:
            self._heard_since_s = time.monotonic()
            self._main.call_soon_threadsafe(self._take_heard)

    def _has_room(self, link: ev.LinkId) -> bool:
        """Tell whether more events of a link may wait for the main loop. The events of one more message may exceed the
        limits."""
        waits = self._heard_weight[link] - self._taken_weight.get(link, 0)
        return len(self._heard) < MAX_HEARD and waits < MAX_HEARD_OF_LINK

    def _main_takes(self) -> bool:
        since_s = self._heard_since_s
        return since_s is None or time.monotonic() - since_s < STUCK_S

    def _turns(self) -> bool:
        """Tell whether this thread's loop and the main loop turn. The thread that answers beats calls this."""
        return time.monotonic() - self._turned_s < STUCK_S and self._main_takes()

    def _take_said(self, said: list[Callable[[LinkService], None]]) -> None:
        assert self._service is not None
        for act in said:
            act(self._service)


def _weight(event: Heard) -> int:
    """Return how much of the room for events of its link an event takes."""
    if type(event) is ev.StepRows:
        return 1 + len(event.rows) // PARTS_OF_WEIGHT
    if type(event) is ev.PrefixSeen:
        return 1 + (len(event.delta.added) + len(event.delta.removed)) // PARTS_OF_WEIGHT
    return 1
