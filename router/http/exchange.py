"""One HTTP request and its answer, as a route sees them.

`ConnectionExchange` is for the server of this package. It writes the head of an answer together with what follows it, knows a
body that has come whole, and tells at once that the client has left. `AsgiExchange` does the same over any ASGI server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Protocol

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

Headers = list[tuple[bytes, bytes]]
EXTENSION: Final = "pdserve.exchange"
"""The name in a scope's `extensions` under which this package's server puts the `ConnectionExchange`."""


class Exchange(Protocol):
    """The request and its answer. The task of the request owns it."""

    def whole_body(self) -> bytes | None:
        """Return the body and take it, if all of it has come. None: it has to be received."""

    def on_gone(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Call `callback` once when the client leaves. Return a function that ends this. The body must have been received."""

    async def start(self, status: int, headers: Headers, body: bytes, *, more: bool) -> None:
        """Write the head and the first part of the body. `headers` have the length of the body, unless it is a stream."""

    async def write(self, body: bytes, *, more: bool) -> None:
        """Write a further part of the body. It is the last one unless there is `more`."""

    @property
    def keeps_up(self) -> bool:
        """True while the client takes what is written, and `write_now` may be called. It may always be False."""

    def write_now(self, body: bytes) -> None:
        """Write a further part of the body, with more to come."""


def exchange_of(scope: Scope, receive: Receive, send: Send) -> Exchange:
    """Return the exchange of an ASGI request."""
    found: Exchange | None = scope.get("extensions", {}).get(EXTENSION)
    return found or AsgiExchange(receive, send)


class AsgiExchange:
    """Implements `Exchange` for a server that is not known. A task waits for the client to leave."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send

    def whole_body(self) -> bytes | None:
        """Implements `Exchange.whole_body`."""
        return None

    def on_gone(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Implements `Exchange.on_gone`."""

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            callback()

        return asyncio.create_task(watch()).cancel

    async def start(self, status: int, headers: Headers, body: bytes, *, more: bool) -> None:
        """Implements `Exchange.start`."""
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self.write(body, more=more)

    async def write(self, body: bytes, *, more: bool) -> None:
        """Implements `Exchange.write`."""
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    @property
    def keeps_up(self) -> bool:
        """Implements `Exchange.keeps_up`. Writing may take a task of any ASGI server some time."""
        return False

    def write_now(self, body: bytes) -> None:
        """Implements `Exchange.write_now`."""
        raise AssertionError("nobody is told that the client keeps up")


class ConnectionExchange:
    """Implements `Exchange` on uvicorn's cycle of a request, whose state it keeps. Routes that do not use it write by the
    cycle. It does not serve HEAD requests and statuses without a body."""

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
        """Implements `Exchange.whole_body`."""
        cycle = self._cycle
        if cycle.more_body or cycle.disconnected or cycle.waiting_for_100_continue:
            return None
        body, cycle.body = bytes(cycle.body), bytearray()
        cycle.message_event.clear()
        cycle.flow.resume_reading()
        return body

    def on_gone(self, callback: Callable[[], object]) -> Callable[[], object]:
        """Implements `Exchange.on_gone`."""
        if self._cycle.disconnected:
            callback()
        else:
            self._gone = callback
            self._cycle.flow.resume_reading()  # uvicorn stops to read for a large body, and then sees no end
        return self._forget

    def _forget(self) -> None:
        self._gone = None

    async def start(self, status: int, headers: Headers, body: bytes, *, more: bool) -> None:
        """Implements `Exchange.start`. Raises `RuntimeError` for a header with a line end, which would begin another one."""
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
        """Implements `Exchange.write`."""
        flow = self._cycle.flow
        if flow.write_paused:
            await flow.drain()
        if not self._cycle.disconnected:
            self._put(b"", body, more=more)

    @property
    def keeps_up(self) -> bool:
        """Implements `Exchange.keeps_up`."""
        return not (self._cycle.flow.write_paused or self._cycle.disconnected)

    def write_now(self, body: bytes) -> None:
        """Implements `Exchange.write_now`."""
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
