"""HTTP spoken by hand, for what a well-behaved client never does."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from router.http.protocol import ConnectionTable, GuardedProtocol

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        return dict(error)


async def connect(base: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(base)
    return await asyncio.open_connection(parts.hostname, parts.port)


def head(method: str, path: str, **headers: Any) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: localhost"] + [f"{name.replace('_', '-')}: {v}" for name, v in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def post(path: str, payload: Any, **headers: Any) -> bytes:
    body = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
    return head("POST", path, content_length=len(body), **headers) + body


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    async with asyncio.timeout(TIMEOUT_S):
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        if headers.get("transfer-encoding") == "chunked":
            return Answer(int(lines[0].split()[1]), headers, await _read_chunks(reader))
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(lines[0].split()[1]), headers, body)


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while size := int(await reader.readline(), 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)
    return body


async def exchange(base: str, request: bytes) -> Answer:
    reader, writer = await connect(base)
    try:
        writer.write(request)
        return await read_answer(reader)
    finally:
        writer.close()


class Writes(asyncio.Transport):
    """A transport that keeps what is written to it."""

    def __init__(self, extra: dict[str, Any] | None = None) -> None:
        super().__init__(extra)
        self.parts: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.parts.append(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def close(self) -> None:
        self.closed = True

    def write_eof(self) -> None:
        """The client reads on."""

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is read."""


async def protocol_post(app: ASGIApp, path: str, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Answer:
    """The application behind the real protocol of a connection, without a socket; the client never leaves."""
    config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False)
    state = ServerState()
    protocol = GuardedProtocol(ConnectionTable(1), TIMEOUT_S, config=config, server_state=state, app_state={})
    transport = Writes()
    protocol.connection_made(transport)
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"host: localhost", b"content-length: %d" % len(body)]
    lines += [b"%s: %s" % header for header in headers]
    protocol.data_received(b"\r\n".join([*lines, b"", body]))
    async with asyncio.timeout(TIMEOUT_S):
        while state.tasks:
            await asyncio.gather(*state.tasks)
    protocol.connection_lost(None)
    reader = asyncio.StreamReader()
    reader.feed_data(b"".join(transport.parts))
    reader.feed_eof()
    return await read_answer(reader)
