"""One HTTP request on its connection: its body, its answer, and its end from outside.

Request bodies are read from clients that are not trusted, so their bytes and their time are bounded. An answer is a whole JSON
object, or an SSE stream that its first event opens. A call ends from outside when its client leaves or when the server closes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from pdserve.core.error_table import TABLE
from pdserve.core.errors import Cancelled, Overloaded, PdserveError, RequestTimeout, RequestTooLarge, Unavailable
from pdserve.core.report import Report
from pdserve.rpc.status import CORRELATION_ID_METADATA, IGNORED_FIELDS_METADATA, REQUEST_ID_METADATA, TIMELINE_METADATA
from router.api.answer import report_json, timeline, unexpected
from router.api.identity import ClientNames, new_request_id
from router.api.request import CLASS_HEADER, SESSION_HEADER
from router.openai.json import encode_json, error_headers, error_payload
from router.openai.request import ClassHeaders, kept_id
from router.parsing.parser import BodyShare

PIECE_BYTES: Final = 64 << 10
"""A long body is written in such pieces, each after the client has taken most of the one before: a transport asks its writer to
wait when it holds more than that."""
JSON: Final = b"application/json"
_REQUEST_ID: Final = REQUEST_ID_METADATA.encode()
_CORRELATION_ID: Final = CORRELATION_ID_METADATA.encode()
_IGNORED: Final = IGNORED_FIELDS_METADATA.encode()
_TIMELINE: Final = TIMELINE_METADATA.encode()
_SSE_HEADERS: Final[Headers] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would otherwise buffer chunks
]

FailureEvent = Callable[[PdserveError, Report | None], bytes]
ErrorForm = Callable[[PdserveError], dict[str, Any]]


class Reply:
    """Writes one answer. The task of its request owns it. `fail` may be called at any moment, because it knows whether a stream
    is open."""

    def __init__(self, exchange: Exchange, owed: BodyShare | None = None, errors: ErrorForm | None = None) -> None:
        """`owed` is the share of an answer that is gathered before it is sent. None: the answer is small. `errors` is the form
        of errors. None: OpenAI's."""
        self._exchange = exchange
        self._errors = errors or error_payload
        self._owed = owed
        self._gathered_bytes = 0
        self._headers: Headers = []
        """The ids of the request, once it has its own, and what is said of its fields."""
        self._header_id: str | None = None
        self._report: Report | None = None
        self._failure: FailureEvent | None = None
        self.started = False
        self._ended = False

    def correlate(self, header_id: str | None) -> None:
        """Set the id that answers carry before the request has its own: that of the client's header, or a new one if it is
        None or nothing of it can be kept."""
        self._header_id = header_id

    def name(self, request_id: str, correlation_id: str) -> None:
        """Set the ids that answers carry from now on. A client that gave no id of its own gets the router's id in its place."""
        self._headers = [
            (_REQUEST_ID, request_id.encode("ascii")),
            (_CORRELATION_ID, (correlation_id or request_id).encode("ascii")),
        ]

    def ignored(self, names: bytes) -> None:
        """Set the names of the fields that were left out, as the value of a header."""
        self._headers = [*self._headers, (_IGNORED, names)]

    def gather(self, length: int) -> None:
        """Count further bytes of an answer that is gathered before it is sent. Raises `Overloaded` or `RequestTooLarge` when
        gathered answers take too much memory."""
        self._gathered_bytes += length
        if self._owed is not None:
            self._owed.grow(self._gathered_bytes)

    @property
    def max_gathered_bytes(self) -> int | None:
        """An answer that is gathered may have so many bytes. None: there is no limit."""
        return None if self._owed is None else self._owed.max_bytes

    def served(self, report: Report) -> None:
        """Set the report of the request. The answer or the error that follows carries it."""
        self._report = report

    def on_failure(self, event: FailureEvent) -> None:
        """Set the form of the event that ends an open stream after an error."""
        self._failure = event

    async def json(self, status: int, payload: Any, headers: Headers | None = None, *, more: bool = False) -> None:
        """Answer with a JSON object. `more` leaves the response open after its body, for a caller that must read on before the
        connection may close."""
        await self.encoded(status, encode_json(payload), headers, more=more)

    async def encoded(self, status: int, body: bytes, headers: Headers | None = None, *, more: bool = False) -> None:
        """Answer with a body that is JSON already, otherwise like `json`."""
        await self._whole(status, len(body), body, headers, more=more)

    async def tensors(self, body: bytes, json_bytes: int) -> None:
        """Answer with JSON of so many bytes and the binary tensors that follow it."""
        length = [(b"inference-header-content-length", str(json_bytes).encode())]
        await self._whole(200, len(body), body, length, more=False, media_type=b"application/octet-stream")

    async def parts(self, status: int, parts: list[bytes]) -> None:
        """Answer with the parts of a body that is JSON already. The list is emptied as the client takes it, so a client that
        reads slowly holds little more than what it has still to take."""
        left = sum(map(len, parts))
        if left <= PIECE_BYTES:
            await self.encoded(status, b"".join(parts))
            return
        for piece in _pieces(parts):
            left_after = left - len(piece)
            if not self.started:
                await self._whole(status, left, piece, more=True)
            elif left_after:
                await self._exchange.write(piece, more=True)
            else:
                await self._last(piece)
            left = left_after

    async def _whole(
        self, status: int, length: int, body: bytes, headers: Headers | None = None, *, more: bool, media_type: bytes = JSON
    ) -> None:
        own = [(b"content-type", media_type), (b"content-length", str(length).encode())]
        told = [(_TIMELINE, timeline(self._report))] if self._report else []
        await self._start(status, own + told + (headers or []), body, more=more)

    async def event(self, data: bytes) -> None:
        """Write a part of a stream, and open it with the first part. Empty data only opens it."""
        if not self.started:
            await self._start(200, _SSE_HEADERS, data, more=True)
        elif data:
            await self._exchange.write(data, more=True)

    @property
    def keeps_up(self) -> bool:
        """True while a stream is open and its client takes what is written, so that `event_now` may be called."""
        return self.started and self._exchange.keeps_up

    def event_now(self, data: bytes) -> None:
        """Write a part of an open stream."""
        if data:
            self._exchange.write_now(data)

    async def end(self, data: bytes = b"") -> None:
        """Write the last part of what was started, or of a stream that opens only now."""
        if not self.started:
            await self._start(200, _SSE_HEADERS, data, more=False)
        else:
            await self._last(data)

    async def fail(self, error: PdserveError, *, more: bool = False, headers: Headers | None = None) -> None:
        """Answer with the error: as a response, or as the last event of an open stream, after which no [DONE] follows."""
        if self._ended:
            return
        if self.started:
            await self._last((self._failure or self._failed)(error, self._report))
        else:
            extra = error_headers(error) + (headers or [])
            await self.json(TABLE[error.code].http, self._errors(error), extra, more=more)

    def _failed(self, error: PdserveError, report: Report | None) -> bytes:
        """Return the error as the last event of a stream."""
        told = {"pdserve": report_json(report)} if report else {}
        return b"data: " + encode_json(self._errors(error) | told) + b"\n\n"

    async def _start(self, status: int, headers: Headers, body: bytes, *, more: bool) -> None:
        self.started = True
        self._ended = not more
        own = self._headers or [(_CORRELATION_ID, (kept_id(self._header_id) or new_request_id()).encode("ascii"))]
        await self._exchange.start(status, headers + own, body, more=more)

    async def _last(self, data: bytes) -> None:
        self._ended = True
        await self._exchange.write(data, more=False)


def _pieces(parts: list[bytes]) -> Iterator[bytes]:
    """Take the parts from the list and yield their bytes in pieces of nearly one size."""
    parts.reverse()
    piece = bytearray()
    while parts:
        part = parts.pop()
        for start in range(0, len(part), PIECE_BYTES):
            piece += part[start : start + PIECE_BYTES]
            if len(piece) >= PIECE_BYTES:
                yield bytes(piece)
                piece.clear()
    if piece:
        yield bytes(piece)


Headers = list[tuple[bytes, bytes]]
EXTENSION: Final = "pdserve.exchange"
"""The name in a scope's `extensions` under which this package's server puts the `Exchange`."""


class Exchange:
    """One HTTP request and its answer on uvicorn's cycle of a request, whose state it keeps. The task of the request owns it.

    It writes the head of an answer together with what follows it, knows a body that has come whole, and tells at once that the
    client has left. Routes that do not use it write by the cycle. It does not serve HEAD requests and statuses without a body.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._gone: Callable[[], object] | None = None
        self._chunked = False

    # The door's side ---------------------------------------------------------------------------------------------------

    def add_headers(self, headers: Headers) -> None:
        """Add headers to the answer, also to one that a route writes by the cycle."""
        self._cycle.default_headers = [*self._cycle.default_headers, *headers]

    # The protocol's side -----------------------------------------------------------------------------------------------

    def client_left(self) -> None:
        """Tell the route that nobody takes the answer any more. The cycle already knows it."""
        if self._gone is not None:
            gone, self._gone = self._gone, None
            gone()

    # The route's side --------------------------------------------------------------------------------------------------

    def whole_body(self) -> bytes | None:
        """Return the body and take it, if all of it has come. None: it has to be received."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        cycle.flow.resume_reading()
        return body

    def on_gone(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Call `callback` once when the client leaves. Return a function that ends this. The body must have been received."""
        if self._cycle.disconnected:
            callback()
        else:
            self._gone = callback
            self._cycle.flow.resume_reading()  # uvicorn stops to read for a large body, and then sees no end
        return self._forget

    def _forget(self) -> None:
        self._gone = None

    async def start(self, status: int, headers: Headers, body: bytes, *, more: bool) -> None:
        """Write the head and the first part of the body. `headers` have the length of the body, unless it is a stream. Raises
        `RuntimeError` for a header with a line end, which would begin another one."""
        cycle = self._cycle
        if cycle.flow.write_paused:
            await cycle.flow.drain()
        if cycle.disconnected:
            return
        cycle.response_started = True
        cycle.waiting_for_100_continue = False
        # HTTP/1.0 knows no chunks: the end of the connection, which is never kept alive, ends a stream
        self._chunked = cycle.scope["http_version"] != "1.0" and all(name != b"content-length" for name, _ in headers)
        if (b"connection", b"close") in headers:
            cycle.keep_alive = False
        elif not cycle.keep_alive:
            headers = [*headers, (b"connection", b"close")]
        lines = [b"%b: %b" % header for header in (*cycle.default_headers, *headers)]
        if self._chunked:
            lines.append(b"transfer-encoding: chunked")
        if any(b"\n" in line or b"\r" in line for line in lines):
            raise RuntimeError("a header of the answer holds a line end")
        self._put(STATUS_LINE[status] + b"\r\n".join(lines) + b"\r\n\r\n", body, more=more)

    async def write(self, body: bytes, *, more: bool) -> None:
        """Write a further part of the body. It is the last one unless there is `more`."""
        flow = self._cycle.flow
        if flow.write_paused:
            await flow.drain()
        if not self._cycle.disconnected:
            self._put(b"", body, more=more)

    @property
    def keeps_up(self) -> bool:
        """True while the client takes what is written, and `write_now` may be called."""
        return not (self._cycle.flow.write_paused or self._cycle.disconnected)

    def write_now(self, body: bytes) -> None:
        """Write a further part of the body, with more to come."""
        self._put(b"", body, more=True)

    def _put(self, head: bytes, body: bytes, *, more: bool) -> None:
        cycle = self._cycle
        if self._chunked:
            part = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            data = head + part if more else b"%b%b0\r\n\r\n" % (head, part)
        else:
            data = head + body
        if data:
            cycle.transport.write(data)
        if not more:
            cycle.response_complete = True
            cycle.message_event.set()
            if not cycle.keep_alive:
                cycle.transport.close()
            cycle.on_response()


def exchange_of(scope: Scope) -> Exchange:
    """Return the exchange of a request."""
    found: Exchange = scope["extensions"][EXTENSION]
    return found


BODY_TIMEOUT_S: Final = 60.0  # 8 MiB at 1 Mbit/s
SILENCE_S: Final = 10.0  # the longest time for which a client may send nothing in the middle of its body
LINGER_S: Final = 2.0
"""A refused body is still read and dropped for this long after the answer. If the connection closed at once, it would be reset,
and a client that is still sending would see the reset instead of the answer."""


class BodyRefused(Exception):
    """A body was not read to its end, so its connection cannot carry another request."""

    def __init__(self, error: PdserveError) -> None:
        super().__init__(error.message)
        self.error = error


async def read_body(scope: Scope, receive: Receive, exchange: Exchange, max_bytes: int, share: BodyShare) -> bytes:
    """Return the whole body. Raises `BodyRefused` as soon as it is known that the body is too large, finds no room, or comes
    too slowly, and `Cancelled` when the client leaves."""
    declared = header(scope, "content-length") or ""
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        if declared.isdecimal():
            share.grow(int(declared))  # takes the whole length at once, so that a later body cannot end one that has begun
        whole = exchange.whole_body()
        if whole is not None:
            if len(whole) > max_bytes:
                raise _too_large(max_bytes)
            share.grow(len(whole))
            return whole
        async with asyncio.timeout(BODY_TIMEOUT_S):
            more = True
            while more:
                more = await _read_part_in_time(receive, body)
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
                share.grow(len(body))
    except TimeoutError as exc:
        raise BodyRefused(RequestTimeout(f"body: not complete after {BODY_TIMEOUT_S:g} s")) from exc
    except Overloaded as exc:
        raise BodyRefused(exc) from exc
    return bytes(body)


@asynccontextmanager
async def errors_told(scope: Scope, receive: Receive, reply: Reply) -> AsyncIterator[None]:
    """Answer with the error that ends the block. An error without a type is raised on, so that the server logs it with its
    traceback."""
    try:
        yield
    except BodyRefused as exc:
        await refuse_body(scope, receive, reply, exc.error)
    except PdserveError as exc:
        await reply.fail(exc)
    except Exception:
        await reply.fail(unexpected())
        raise


async def refuse_body(scope: Scope, receive: Receive, reply: Reply, error: PdserveError) -> None:
    """Answer with an error and close the connection so that the client still sees the answer. What is still read is dropped."""
    await reply.fail(error, more=True, headers=[(b"connection", b"close")])
    if (header(scope, "expect") or "").lower() != "100-continue":  # such a client sends nothing before it is told to
        await _discard(receive)
    await reply.end()


async def _read_part_in_time(receive: Receive, body: bytearray) -> bool:
    try:
        async with asyncio.timeout(SILENCE_S):
            return await _read_part(receive, body)
    except TimeoutError as exc:
        raise BodyRefused(RequestTimeout(f"body: nothing came for {SILENCE_S:g} s")) from exc


async def _read_part(receive: Receive, body: bytearray) -> bool:
    """Append what has arrived. True: more is to come. Raises `Cancelled` when the client leaves."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise Cancelled("the client left while it sent the body")
    body += message.get("body", b"")
    return bool(message.get("more_body", False))


async def _discard(receive: Receive) -> None:
    try:
        async with asyncio.timeout(LINGER_S):
            while await _read_part(receive, bytearray()):
                pass
    except (TimeoutError, Cancelled):
        pass  # the client has the answer, or does not want it


def _too_large(max_bytes: int) -> BodyRefused:
    return BodyRefused(RequestTooLarge(f"body: is over the limit of {max_bytes} bytes", field="body"))


def client_of(scope: Scope, clients: ClientNames) -> tuple[str, str, str]:
    """Return the names of the client, its connection and a new call."""
    host, port = scope.get("client") or ("", 0)
    return clients.of(host, f"{host} {port}", header(scope, clients.header) if clients.header else None)


def first_headers(scope: Scope) -> dict[str, str]:
    """Return the value of the first header of each name, which is in lower case."""
    return {str(key, "latin-1"): str(value, "latin-1") for key, value in reversed(scope["headers"])}


def header(scope: Scope, name: str) -> str | None:
    """Return the value of the first header with this name, which is in lower case. None: there is none."""
    wanted = name.encode()
    for key, value in scope["headers"]:
        if key == wanted:
            return str(value, "latin-1")
    return None


def class_headers(scope: Scope) -> ClassHeaders:
    """Return the headers that stand for the fields of the class and the session."""
    return ClassHeaders(header(scope, CLASS_HEADER), header(scope, SESSION_HEADER))


def json_response(payload: object, status: int = 200) -> Response:
    """Return a small answer of a route that needs no `Reply`."""
    return Response(encode_json(payload), status, media_type=JSON.decode())


T = TypeVar("T")


class RunningCalls:
    """The calls of one HTTP server, which owns this. It cancels work that is to end from outside."""

    def __init__(self) -> None:
        self._calls: dict[_Running, None] = {}

    def __len__(self) -> int:
        return len(self._calls)

    async def run(self, exchange: Exchange, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns. Raises what it raises, `Cancelled` when the client leaves, `Unavailable` when the server
        closes. The whole body must have been received."""
        task = asyncio.current_task()
        assert task is not None
        running = _Running(task)
        unwatch = exchange.on_gone(running.client_left)
        self._calls[running] = None
        try:
            return await work
        except asyncio.CancelledError:
            if running.error is None or task.uncancel() > running.cancelling:
                raise  # somebody else cancelled the task
            raise running.error from None
        finally:
            running.ended = True
            unwatch()
            del self._calls[running]

    def cancel_all(self) -> None:
        """Cancel all running work."""
        for running in self._calls:
            running.end(Unavailable("the server is closing"))


class _Running:
    """The work of one call. Its task is cancelled once, and the error says why."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.cancelling = task.cancelling()
        self.error: PdserveError | None = None
        self.ended = False

    def client_left(self) -> None:
        self.end(Cancelled("the client left"))

    def end(self, error: PdserveError) -> None:
        if self.error is None and not self.ended:
            self.error = error
            self._task.cancel()
