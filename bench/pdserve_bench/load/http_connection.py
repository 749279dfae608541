"""One HTTP/1.1 connection of the load generator. It takes the time of each answer where the bytes come in.

A connection serves one request at a time and is kept for the next one. httptools bounds neither a head nor trailers, so both
are counted here; the reader bounds what it keeps of a body.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Final, Protocol, cast

import httptools

from pdserve_bench.load.failures import BAD_HTTP, BROKEN_STREAM, HEAD_TOO_LONG, TARGET_BUG

MAX_HEAD_BYTES: Final = 64 << 10
MAX_BETWEEN_BYTES: Final = 64 << 10
"""The most bytes of trailers and chunk extensions in a row."""
LINGER_S: Final = 1.0
"""The longest time between the end of an answer and the end of its HTTP message."""


_log = logging.getLogger(__name__)


class ResponseReader(Protocol):
    """The reader of one answer."""

    done: bool
    """The answer has come whole."""

    @property
    def failed(self) -> bool:
        """The answer has failed, and the connection is of no use any more."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Take the status and the headers, with names in lower case."""

    def body(self, data: bytes, now_s: float) -> None:
        """Take a part of the body."""

    def end(self, now_s: float) -> None:
        """Note the end of the message or of the connection."""


class HttpConnection(asyncio.Protocol):
    """One connection. Its target owns it, and closes it by `abort`."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._reader: ResponseReader | None = None
        self._over: asyncio.Future[str] | None = None  # the end of the present request: "", or its failure
        self._timer: asyncio.TimerHandle | None = None
        self._now_s = 0.0
        self._headers: dict[bytes, bytes] = {}
        self._in_head = True
        self._uncounted = 0  # bytes in a row that are no part of a body
        self._body_came = False
        self.received = False
        """A byte of the present answer has come."""
        self.usable = True
        """The connection may take a further request when this one is over."""

    async def request(self, data: bytes, reader: ResponseReader) -> str:
        """Send a request and wait for the end of its answer. Return the reason of a failure, or nothing.

        A cancellation aborts the connection.
        """
        assert self._transport is not None
        assert self._over is None
        self._reader = reader
        self._parser = httptools.HttpResponseParser(self)
        self._begin_message()
        self.received = False
        self._over = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        try:
            return await self._over
        finally:
            if not self._over.done() or self._over.cancelled():
                self.abort()
            self._over = self._reader = None

    def abort(self) -> None:
        """Close the connection at once."""
        self.usable = False
        self._disarm()
        if self._transport is not None:
            self._transport.abort()

    # Calls of the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # that of uvloop is no subclass

    def data_received(self, data: bytes) -> None:
        """Parse what was read. The time of all that it holds is now."""
        self._now_s = time.perf_counter()
        reader, parser = self._reader, self._parser
        if reader is None or parser is None:  # nobody asked for it
            self.abort()
            return
        self.received = True
        self._body_came = False
        try:
            parser.feed_data(data)
        except httptools.HttpParserCallbackError:  # a bug here, since readers raise nothing
            _log.exception("an answer could not be read")
            self._fail(TARGET_BUG)
            return
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(BAD_HTTP)
            return
        self._uncounted = 0 if self._body_came else self._uncounted + len(data)
        if self._uncounted > (MAX_HEAD_BYTES if self._in_head else MAX_BETWEEN_BYTES):
            self._fail(HEAD_TOO_LONG if self._in_head else BAD_HTTP)
        elif reader.failed:
            self._fail("")
        elif reader.done and self._timer is None and self._waits:
            self._timer = asyncio.get_running_loop().call_later(LINGER_S, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the request that runs. An answer may end with its connection."""
        self.usable = False
        self._disarm()
        if self._reader is not None and self._waits:
            whole = exc is None and self.received and not self._in_head
            if whole or self._reader.done:
                self._reader.end(time.perf_counter())
            self._resolve("" if whole or self._reader.done else BROKEN_STREAM)

    # Calls of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. Trailers are only counted."""
        if self._in_head:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        """Hand the head to the reader, unless it only announces another one."""
        assert self._parser is not None
        status = self._parser.get_status_code()
        if self._reader is None:  # a second answer to one request
            self.usable = False
        elif status >= 200:
            self._in_head = False
            self._reader.head(status, self._headers)

    def on_body(self, data: bytes) -> None:
        """Hand a part of the body to the reader."""
        reader = self._reader
        if reader is not None and not reader.failed and not reader.done:
            self._body_came = True
            reader.body(data, self._now_s)

    def on_message_complete(self) -> None:
        """End the request. The connection stays if both sides allow it."""
        assert self._parser is not None
        if self._parser.get_status_code() < 200:  # it only announces the answer
            self._begin_message()
            return
        if self._reader is not None:
            self._reader.end(self._now_s)
            self._reader = None
        self.usable = self.usable and self._parser.should_keep_alive()
        self._disarm()
        self._resolve("")

    @property
    def _waits(self) -> bool:
        return self._over is not None and not self._over.done()

    def _begin_message(self) -> None:
        self._headers = {}
        self._in_head = True
        self._uncounted = 0

    def _fail(self, reason: str) -> None:
        self.usable = False
        self._resolve(reason)
        self.abort()

    def _resolve(self, reason: str) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(reason)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
