"""A scripted HTTP server: it answers each request with bytes that the test chose, and keeps what it was sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pdserve_bench.load.http_target import BaseUrl, HttpOptions, HttpTarget
from pdserve_bench.load.target import LoadAnswer, LoadCall, RequestOptions

HANG_UP = b"\x00hang up"
"""Closes the connection in place of sending."""


def sse_head(more: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n" + more + b"\r\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str, **rest: Any) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": None}], **rest)


def whole(head: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)


GOOD = [
    sse_head(),
    chunked(token("a")),
    chunked(token("b") + token("c")),
    chunked(event(choices=[{"index": 0, "text": "", "finish_reason": "length"}])),
    chunked(event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 3}) + b"data: [DONE]\n\n") + b"0\r\n\r\n",
]


@dataclass
class Seen:
    """The requests that came, and the connections that brought them."""

    heads: list[bytes] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    connections: int = 0


@asynccontextmanager
async def scripted_server(answer: Callable[[int], Sequence[bytes]]) -> AsyncIterator[tuple[BaseUrl, Seen]]:
    """Serve on loopback. `answer` gets the number of the request, and its parts are sent with a turn of the loop between."""
    seen = Seen()
    tasks: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks[task] = writer
        seen.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next((int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:")), 0)
                seen.heads.append(head)
                seen.bodies.append(json.loads(await reader.readexactly(length) or b"null"))
                for part in answer(len(seen.heads) - 1):
                    if part == HANG_UP:
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield BaseUrl.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), seen
    finally:
        server.close()
        for writer in tasks.values():
            writer.transport.abort()
        await asyncio.gather(*tasks)


async def ask(url: BaseUrl, calls: Sequence[LoadCall], http: HttpOptions | None = None) -> list[LoadAnswer]:
    """Send the calls one after the other on one target, which is closed."""
    target = HttpTarget(url, RequestOptions(model="m"), http or HttpOptions())
    answers = []
    try:
        for call in calls:
            answer = LoadAnswer()
            async with asyncio.timeout(60):
                await target.send(call, answer)
            answers.append(answer)
    finally:
        await target.close()
    return answers
