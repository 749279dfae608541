"""A kept-alive HTTP connection for benchmarks that ask for streamed answers. It is cheaper than a client library."""

from __future__ import annotations

import asyncio
from typing import Final, cast

_OK: Final = b"HTTP/1.1 200"
_BODY_END: Final = b"\r\n0\r\n\r\n"


class HttpStream(asyncio.Protocol):
    """One connection, with at most one request under way."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._whole: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        """Collect the answer until its end."""
        self._received += data
        if self._whole is None or self._whole.done():
            return
        if not self._received.startswith(_OK[: len(self._received)]):  # a refusal has no chunks, so its end is not waited for
            self._whole.set_exception(ConnectionError(f"refused with {bytes(self._received)!r}"))
        elif self._received.endswith(_BODY_END):
            self._whole.set_result(bytes(self._received))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request under way."""
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(ConnectionError(f"closed after {bytes(self._received)!r}"))

    async def ask(self, request: bytes) -> bytes:
        """Send a request, and return the whole answer. Raises `ConnectionError` when the server refuses it, or closes the
        connection."""
        assert self._transport is not None
        self._received.clear()
        self._whole = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._whole

    def close(self) -> None:
        """Close the connection."""
        assert self._transport is not None
        self._transport.abort()


def post(path: str, encoded: bytes) -> bytes:
    """Return the bytes of a POST of JSON."""
    head = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(encoded)}",
        "\r\n",
    )
    return "\r\n".join(head).encode() + encoded
