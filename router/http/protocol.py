"""uvicorn's HTTP/1.1 protocol, with bounds on what a client may do before its request is complete.

httptools bounds neither the size of a head or of trailers nor the time in which they arrive, so a connection could hold memory,
or stay open, for ever. Here everything but the body has a bounded size and time; `router.http.reply` bounds bodies. An offer to
speak another protocol is declined as RFC 9110 section 7.8 allows: the request is answered in HTTP/1.1. The Date header is made
when a request asks for one and not by a timer, so an idle server does nothing.

A connection is read while its request is answered, because the end of a connection is seen only by reading it. uvicorn would
stop to read when a further request comes; here such requests are kept, and bounded by number and size.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable
from email.utils import formatdate
from typing import Any, Final

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError
from router.http.door import (
    Door,
    Refusal,
    head_too_large,
    head_too_slow,
    malformed,
    no_tunnel,
    other_version,
    too_many_connections,
    trailers_too_large,
)
from router.http.reply import EXTENSION, LINGER_S, Exchange, RunningCalls

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES: Final = 64 << 10  # the limit of h11, uvicorn's other parser
MAX_HEADERS: Final = 100  # Apache's LimitRequestFields, and h2o's and Go's order of magnitude
MAX_TRAILER_BYTES: Final = 8 << 10  # nginx's limit for one large header; trailers are not used here, only counted and dropped
MAX_BETWEEN_BYTES: Final = 64 << 10  # chunk extensions and trailers without a byte of body between them
MAX_PIPELINED: Final = 16  # requests behind the one that is being answered; each costs some KiB before it is looked at
MAX_BEHIND_BYTES: Final = 256 << 10  # of all these requests together, as much as one read of uvloop
HEAD_TIMEOUT_S: Final = 30.0
MAX_DROPPED_BYTES: Final = 8 << 20  # of what a refused connection still sends; a body may have as many by default


class GuardedProtocol(HttpToolsProtocol):
    """The protocol of one connection. `_head_bytes` counts a head from its second read on, because the first read, up to 256
    KiB, may also hold the body before it. `_kept_bytes` counts every byte of the parts of that head that the parser has
    completed."""

    def __init__(self, table: ConnectionTable, stalled_client_s: float, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._table = table
        self._stalled_client_s = stalled_client_s
        self._stalled: asyncio.TimerHandle | None = None
        self._over = False  # the connection is refused, and what still comes is ignored
        self._dropped_bytes = 0
        self._head_open = True
        self._head_begins = True
        self._head_bytes = 0
        self._kept_bytes = 0
        self._body_open = False
        self._body_came = False  # a part of the body came in this read
        self._between_bytes = 0
        self._trailer_bytes = 0
        self._declined = False  # this head offers another protocol, and the parser stops at it
        self._running: RequestResponseCycle | None = None  # the request that is being answered; others may wait behind it
        self._exchange: Exchange | None = None  # that of `_running`
        self._behind_bytes: deque[int] = deque()  # of each request that waits behind `_running`, the newest first
        self._timer: asyncio.TimerHandle | None = None

    # The connection ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Admit the connection, or refuse it when all places serve requests."""
        super().connection_made(transport)
        if self._table.admit(self):
            self._arm(HEAD_TIMEOUT_S, self._head_late)
        else:
            self._refuse(too_many_connections(self._table.max_connections))

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the table, drop what waits, and tell the running request that the client is gone."""
        self._table.forget(self)
        self._disarm()
        self._unset_stalled()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        if self._running is not None and self._running is not self.cycle:  # uvicorn tells only the last request that came
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        if self._exchange is not None:
            self._exchange.client_left()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._behind_bytes:
            self._behind_bytes.pop()
        self._running = cycle
        self._exchange = Exchange(cycle)
        scope: Any = cycle.scope
        scope["extensions"] = {EXTENSION: self._exchange}
        super()._start_asgi_task(cycle, app)

    @property
    def has_unsent(self) -> bool:
        """True while a part of an answer waits for the client to take it."""
        return self.transport.get_write_buffer_size() > 0

    def pause_writing(self) -> None:
        """Give the client some time to take three quarters of what is buffered, which is 48 KiB. One that reads a byte now and
        then would otherwise hold its answer for ever."""
        super().pause_writing()
        self._stalled = self.loop.call_later(self._stalled_client_s, self._drop_slow_client)

    def resume_writing(self) -> None:
        """Write on, since the client has taken enough."""
        super().resume_writing()
        self._unset_stalled()

    def _drop_slow_client(self) -> None:
        """Abort the connection. The kernel is told to drop what it still has to send, which may be megabytes."""
        logger.warning("a client took too little of its answer for %.1f s, and was dropped", self._stalled_client_s)
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _unset_stalled(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def timeout_keep_alive_handler(self) -> None:
        """End a connection that has had no request for long, also one whose client has not taken its last answer since."""
        if self.has_unsent:
            self._drop_slow_client()
        else:
            super().timeout_keep_alive_handler()

    def give_way(self) -> None:
        """Abort the connection, which waits for a request or has been refused, in favour of a new one."""
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse what was read, and count it against the bounds of heads and trailers."""
        if self._over:
            self._dropped_bytes += len(data)
            if self._dropped_bytes > MAX_DROPPED_BYTES:
                self.transport.abort()
            return
        self._body_came = False
        self._feed(data)
        if self._over or self.transport.is_closing():
            return
        if self._head_open:
            self._head_bytes = 0 if self._head_begins else self._head_bytes + len(data)
            self._head_begins = False
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(head_too_large(f"{MAX_HEAD_BYTES} bytes"))
        elif self._body_open:
            self._between_bytes = 0 if self._body_came else self._between_bytes + len(data)
            if self._between_bytes > MAX_BETWEEN_BYTES:
                self._refuse(trailers_too_large(MAX_TRAILER_BYTES))

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            if not self._over:  # bounds the recursion: `_over` is set once too many requests wait
                self._decline_upgrade(data[exc.args[0] :])
        except httptools.HttpParserError as exc:
            if not self._over:
                self.send_400_response(f"Invalid HTTP request received: {exc}")

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parse the same head again without the offer, and then what came behind it."""
        self._declined = False
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(no_tunnel())
            return
        head = declined(method, self.url, self.parser.get_http_version(), self.headers)
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as in uvicorn's parser
        self._feed(head + rest)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP."""
        self._refuse(malformed(msg))

    # Calls of the parser ---------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a new request: reset the counts, and bound the time of its head."""
        self._head_open = self._head_begins = True
        self._kept_bytes = self._trailer_bytes = 0
        self._table.begins(self)
        self._unset_keepalive_if_required()
        self._arm(HEAD_TIMEOUT_S, self._head_late)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Take a part of the URL if the head still fits."""
        if self._fits(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take one header if the head still fits. Trailers are only counted."""
        length = len(name) + len(value)
        if not self._head_open:
            self._trailer_bytes += length
            if self._trailer_bytes > MAX_TRAILER_BYTES:
                self._refuse(trailers_too_large(MAX_TRAILER_BYTES))
        elif self._fits(length):
            super().on_header(name, value)
            if len(self.headers) > MAX_HEADERS:
                self._refuse(head_too_large(f"{MAX_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        """Start the request, unless it was refused or its offer is declined first."""
        self._declined = self.parser.should_upgrade()
        if self._over or self._declined:
            return
        version = self.parser.get_http_version()
        hosts = sum([name == b"host" for name, _ in self.headers])
        if version not in ("1.0", "1.1"):
            self._refuse(other_version(version))
            return
        if hosts > 1 or (hosts == 0 and version == "1.1"):  # RFC 9112 section 3.2
            self._refuse(malformed(f"Host: must be given once, got {hosts}"))
            return
        self._head_open = False
        self._body_open = True
        self._between_bytes = 0
        self._disarm()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._over = True
            self.transport.abort()  # an answer would have to wait for those before it
            return
        self._table.serves(self)
        self._refresh_date()
        super().on_headers_complete()
        if self.cycle is not self._running:
            self._behind_bytes.appendleft(0)
            self._wait_behind(self._kept_bytes)

    def on_body(self, body: bytes) -> None:
        """Hand on a part of the body, unless the connection is refused."""
        self._body_came = True
        if not self._over:
            super().on_body(body)
            if self.cycle is not self._running:
                self._wait_behind(len(body))

    def _wait_behind(self, length: int) -> None:
        """Keep a part of a request that waits behind the running one, and read on."""
        self._behind_bytes[0] += length
        self.flow.resume_reading()
        if sum(self._behind_bytes) > MAX_BEHIND_BYTES:
            self._over = True
            self.transport.abort()

    def on_message_complete(self) -> None:
        """End the body of the request. The connection waits again if the answer was already complete."""
        if self._over or self._declined:
            return
        self._body_open = False
        super().on_message_complete()
        if self.cycle.response_complete:  # the answer was complete before the request
            self._disarm()
            self._table.waits(self)

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the rest of a body that was answered early, for at most `LINGER_S`."""
        super().on_response_complete()
        if self.transport.is_closing():
            if self.has_unsent:
                self._arm(self._stalled_client_s, self._drop_slow_client)
            return
        if self._body_open and self.cycle.response_complete:
            self._arm(LINGER_S, self.transport.abort)
        elif self.cycle.response_complete:
            self._table.waits(self)

    # Refusing ----------------------------------------------------------------------------------------------------------

    def _fits(self, length: int) -> bool:
        self._kept_bytes += length
        if self._kept_bytes > MAX_HEAD_BYTES:
            self._refuse(head_too_large(f"{MAX_HEAD_BYTES} bytes"))
        return not self._over

    def _head_late(self) -> None:
        if self._head_bytes or not self._head_begins:
            self._refuse(head_too_slow(HEAD_TIMEOUT_S))
        else:  # the client has sent nothing of a request
            self.transport.abort()

    def _refuse(self, why: Refusal) -> None:
        """Answer and end. What the client still sends is read and dropped for a while, so that it sees the answer and not a
        reset connection."""
        if self._over:
            return
        self._over = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            answering = cycle.response_started or bool(self.pipeline) or self._head_open  # an answer would be out of turn
            cycle.disconnected = True
            cycle.message_event.set()
            if self._exchange is not None and cycle is self._running:
                self._exchange.client_left()
            if answering:
                self.transport.abort()
                return
        self._refresh_date()
        self.transport.write(why.encode(self.server_state.default_headers))
        self.transport.write_eof()
        self._arm(LINGER_S, self.transport.abort)

    def _arm(self, delay_s: float, action: Any) -> None:
        self._disarm()
        self._timer = self.loop.call_later(delay_s, action)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refresh_date(self) -> None:
        state: Any = self.server_state
        now_s = int(time.time())
        if getattr(state, "date_s", None) != now_s:
            state.date_s = now_s
            state.default_headers = [(b"date", formatdate(now_s, usegmt=True).encode())]


PATIENCE_S: Final = 2.0
"""A head may take so long before its connection has to make room. TCP sends a lost segment again after 0.2 to 1 s."""
LEAST_REFUSED: Final = 64
REFUSED_SHARE: Final = 2
"""Half as many connections as have places may be on their way out, so that the clients of a burst get an answer that says
why."""


class ConnectionTable:
    """The connections of one HTTP server, which owns this. At most `max_connections` are in it, each from `admit` to
    `forget`, and a new one may push out an old one.

    A connection without a request waits: for a request, or for the rest of its head. One that has been answered makes room
    first, the one that has waited longest before the others, because its client can ask again. One that has only come, or has
    begun a head, gets some seconds for it, and makes room when these are over. So neither idle clients nor clients that send a
    head very slowly lock others out for long, and nobody is pushed out while its request is on the way.
    """

    def __init__(
        self,
        limit: int | Callable[[], int],
        on_refused: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`limit`: the number, or what returns the present one. `on_refused` hears of each connection that gets no place."""
        self._limit = limit
        self._on_refused = on_refused
        self._clock = clock
        self._all: set[GuardedProtocol] = set()
        self._answered: dict[GuardedProtocol, None] = {}  # the one that has waited longest comes first, here and below
        self._begun_s: dict[GuardedProtocol, float] = {}
        self._refused: dict[GuardedProtocol, None] = {}

    @property
    def max_connections(self) -> int:
        """The number of connections that may be in the table now."""
        return self._limit() if callable(self._limit) else self._limit

    def __len__(self) -> int:
        return len(self._all)

    def admit(self, connection: GuardedProtocol) -> bool:
        """Give the connection a place, if need be the place of a waiting connection. False: no connection makes room. The
        client then gets an answer that says so. The connection stays known until `forget`, or until too many others get such an
        answer."""
        if len(self._all) >= self.max_connections:
            leaver = self._leaver()
            if leaver is None:
                self._on_refused()
                self._refuse(connection)
                return False
            self.forget(leaver)
            leaver.give_way()
        self._all.add(connection)
        self._begun_s[connection] = self._clock()
        return True

    def waits(self, connection: GuardedProtocol) -> None:
        """Note that the connection has been answered and has no further request."""
        self._answered.pop(connection, None)
        self._begun_s.pop(connection, None)
        if connection in self._all:
            self._answered[connection] = None

    def begins(self, connection: GuardedProtocol) -> None:
        """Note that a further head has begun to come."""
        if connection in self._answered:
            del self._answered[connection]
            self._begun_s[connection] = self._clock()

    def serves(self, connection: GuardedProtocol) -> None:
        """Note that the whole head has come, so the connection has a request now."""
        self._answered.pop(connection, None)
        self._begun_s.pop(connection, None)

    def forget(self, connection: GuardedProtocol) -> None:
        """Free the place of the connection, if it has one."""
        self._all.discard(connection)
        self._answered.pop(connection, None)
        self._begun_s.pop(connection, None)
        self._refused.pop(connection, None)

    def _leaver(self) -> GuardedProtocol | None:
        """Return the connection that makes room. None: each has a request, or has just come."""
        for connection in self._answered:
            if not connection.has_unsent:
                return connection
        for connection, since_s in self._begun_s.items():
            return connection if self._clock() - since_s >= PATIENCE_S else None
        return None

    def _refuse(self, connection: GuardedProtocol) -> None:
        if len(self._refused) >= max(LEAST_REFUSED, self.max_connections // REFUSED_SHARE):
            oldest = next(iter(self._refused))
            self.forget(oldest)
            oldest.give_way()
        self._refused[connection] = None


_OFFER: Final = {b"upgrade", b"http2-settings"}  # names of headers and options of Connection; they concern this hop alone


def declined(method: bytes, url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the head without its offer to go on in another protocol, as RFC 9110 section 7.8 allows. httptools treats every
    offer as accepted and stops at the head, whether a body follows or not. Java's HttpClient and `curl --http2` offer HTTP/2
    with each first request. Names in `headers` are in lower case, and values hold no line ends, since the head was
    parsed before."""
    lines = [b"%s %s HTTP/%s" % (method, url, version.encode())]
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(option for option in options if option.lower() not in _OFFER)
        if name not in _OFFER and (value or name != b"connection"):
            lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])


# The listening socket -------------------------------------------------------------------------------------------------
#
# The listening socket of the HTTP front end and its life. The server runs in the router's own loop, without signal
# handlers.


BACKLOG: Final = 1024
KEEP_ALIVE_S: Final = 75  # above the usual 60 s of proxies, so that the client side closes first
CLOSE_GRACE_S: Final = 1.0  # running answers may take this long to finish
CLOSE_STEP_S: Final = 1.0  # cancelled answers may take this long to tell their clients


class HttpServer:
    """The running HTTP server that `router.http.serve_http` returns. Its owner must `close` it."""

    def __init__(self, server: asyncio.Server, state: ServerState, running: RunningCalls, port: int) -> None:
        self._server = server
        self._state = state
        self._running = running
        self.port = port

    async def close(self, grace_s: float = CLOSE_GRACE_S) -> None:
        """Accept nothing more, let answers finish for `grace_s`, then cancel them. Bounded and idempotent."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        await self._wait(grace_s)
        self._running.cancel_all()
        await self._wait(CLOSE_STEP_S)
        for connection in list(self._state.connections):
            connection.transport.abort()
        for task in self._state.tasks:
            task.cancel()
        await self._wait(CLOSE_STEP_S)

    async def _wait(self, timeout_s: float) -> None:
        """Wait for the tasks of all requests. A task ends by itself or by an error, or stays for the next step."""
        tasks = set(self._state.tasks)
        if tasks and timeout_s > 0:
            await asyncio.wait(tasks, timeout=timeout_s)


async def start_server(
    app: ASGIApp,
    running: RunningCalls,
    host: str,
    port: int,
    limits: RouterConfig,
    table: ConnectionTable,
    flag: str = "--http-port",
) -> HttpServer:
    """Listen and serve. Raises `ConfigError` naming the flag when the address is not available."""
    sock = await _listen(host, port, limits.stalled_client_s, flag)
    try:
        config = uvicorn.Config(
            Door(app, limits, host), http=HttpToolsProtocol, ws="none", lifespan="off", interface="asgi3", log_config=None,
            access_log=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S,
        )  # fmt: skip
        config.load()
        state = ServerState()
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            return GuardedProtocol(table, limits.stalled_client_s, config=config, server_state=state, app_state={}, _loop=loop)

        server = await loop.create_server(protocol, sock=sock, backlog=BACKLOG)
    except BaseException:
        sock.close()
        raise
    return HttpServer(server, state, running, sock.getsockname()[1])


async def _listen(host: str, port: int, stalled_client_s: float, flag: str) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as exc:
        raise ConfigError(f"{_host_flag(flag)}: {host!r} is not an address of this machine: {exc.strerror}") from exc
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        _set_options(sock, stalled_client_s)
        sock.bind(address)
        sock.listen(BACKLOG)  # finds a second listener now, which listen(2) would otherwise refuse later
    except OSError as exc:
        sock.close()
        raise _cannot_bind(exc, host, port, flag) from exc
    return sock


def _set_options(sock: socket.socket, stalled_client_s: float) -> None:
    """Set socket options. Accepted connections inherit them."""
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a token is far smaller than a segment
    user_timeout: Any = getattr(socket, "TCP_USER_TIMEOUT", None)  # Linux only
    if user_timeout is not None:
        # The kernel ends a connection whose client takes nothing, or is unreachable, for so long. A write that waits
        # for the client then ends too, without a timer of our own for each token.
        sock.setsockopt(socket.IPPROTO_TCP, user_timeout, int(stalled_client_s * 1000))


def _cannot_bind(exc: OSError, host: str, port: int, flag: str) -> ConfigError:
    if exc.errno == errno.EADDRINUSE:
        return ConfigError(f"{flag}: port {port} of {host} is in use; choose another, or 0 for any free one")
    if exc.errno == errno.EACCES:
        return ConfigError(f"{flag}: port {port} needs privileges that this process lacks; choose one from 1024")
    return ConfigError(f"{_host_flag(flag)}: cannot listen on {host}, port {port}: {exc.strerror}")


def _host_flag(flag: str) -> str:
    """Return the name of the host that belongs to the port of a flag."""
    return "--host" if flag.startswith("--") else flag.replace("_port", "_host")
