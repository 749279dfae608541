"""Workers' links on a thread with a loop of its own, so that no flood of clients makes workers give up the router.

The core stays on the main loop, with the front ends. Events reach the core in order through one queue, and a batch of them
costs one wake-up. Commands reach the links in order as well, all those of a turn of the main loop together, so that they share
a wake-up and travel as a bundle. Heartbeats and beats are answered here at once, as long as the main loop takes events. A main
loop that has taken no events for `STUCK_S` hangs, and its workers should learn of it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import uvloop

from pdserve.core.errors import ConfigError, InternalBug, PdserveError
from pdserve.rpc.beats import STUCK_S
from pdserve.rpc.server import bind_port, client_options, make_server, stop_server
from pdserve.rpc.v1 import link_pb2, link_pb2_grpc
from router.core import events as ev
from router.workers.beat_port import BeatPort
from router.workers.link import RETURN_S, Deliver, LinkService
from router.workers.wire import Heard

logger = logging.getLogger(__name__)

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
