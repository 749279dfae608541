"""HTTP spoken by hand, for what a well-behaved client never does."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message

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


async def asgi_post(app: ASGIApp, path: str, body: bytes, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Answer:
    """The application without a socket; the client never leaves."""
    inbox: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        if not inbox:
            await asyncio.Event().wait()
        return inbox.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
             "headers": list(headers), "http_version": "1.1", "scheme": "http", "state": {}}  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), TIMEOUT_S)
    assert not sent[-1].get("more_body")
    start_headers = {name.decode(): value.decode("latin-1") for name, value in sent[0]["headers"]}
    return Answer(sent[0]["status"], start_headers, b"".join(message["body"] for message in sent[1:]))
