"""The connection to a server of vLLM, before servers that send any bytes: the error is a typed one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdserve.core.errors import InvalidRequest, PdserveError, ReplicaLost
from pdserve.worker.vllm.client import VllmClient
from pdserve.worker.vllm.requests import MAX_LINE_BYTES

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DEEP = b"[" * 100_000


@contextlib.asynccontextmanager
async def serving(answer: bytes, *, at_once: bool = True) -> AsyncIterator[tuple[VllmClient, list[bytes], str]]:
    """Serve this answer to every request, and close the connection. Yield a client, a list that gets the head of each request,
    and the address."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            for piece in [answer] if at_once else [bytes([one]) for one in answer]:
                writer.write(piece)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = VllmClient(url)
    try:
        yield client, heads, url
    finally:
        await client.close()
        server.close()


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(content), content)


def plain(content: bytes, head: bytes = OK) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n%s" % (len(content), content)


async def events(client: VllmClient) -> list[Any]:
    async with contextlib.aclosing(client.stream({})) as answers:
        return [answer async for answer in answers]


BAD = {
    "nothing": b"",
    "no HTTP": b"SSH-2.0-x\r\n\r\n",
    "half a head": b"HTTP/1.1 200",
    "huge header": OK + b"X: " + b"x" * 200_000 + b"\r\n\r\n",
    "many headers": OK + b"".join(b"X-%d: y\r\n" % n for n in range(50_000)) + b"\r\n",
    "two lengths": OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    "negative length": OK + b"Content-Length: -1\r\n\r\n",
    "chunks of garbage": CHUNKED + b"zz\r\nhello\r\n",
    "chunk cut": CHUNKED + b"ff\r\ndata: {",
    "body cut": OK + b"Content-Length: 100\r\n\r\ndata: {",
    "bad JSON": CHUNKED + chunk(b"data: {\n\n") + b"0\r\n\r\n",
    "deep JSON": CHUNKED + chunk(b"data: " + DEEP + b"\n\n") + b"0\r\n\r\n",
    "no UTF-8": CHUNKED + chunk(b'data: "\xff"\n\n') + b"0\r\n\r\n",
    "endless line": CHUNKED + chunk(b"data: " + b"x" * (MAX_LINE_BYTES + 1)),
    "deep error": plain(DEEP, b"HTTP/1.1 500 Oh\r\n"),
    "odd status": b"HTTP/1.1 99999 x\r\n\r\n",
    "no content": b"HTTP/1.1 204 No\r\n\r\n",
    "continue, then the end": b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
    "loop": b"HTTP/1.1 307 Elsewhere\r\nLocation: /inference/v1/generate\r\nContent-Length: 0\r\n\r\n",
    "redirect to nowhere": b"HTTP/1.1 307 Elsewhere\r\nLocation: http://[::x\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_answer_is_a_typed_error(name: str) -> None:
    async def main() -> None:
        async with serving(BAD[name]) as (client, _, _):
            with pytest.raises(ReplicaLost):
                await events(client)
            with pytest.raises(ReplicaLost):
                await client.ask({})
            if name not in ("bad JSON", "deep JSON", "no UTF-8"):
                with pytest.raises(PdserveError):
                    await client.load_page(5.0)

    asyncio.run(main())


def test_a_compressed_answer_that_nobody_asked_for_has_no_events() -> None:
    async def main() -> None:
        async with serving(plain(b"\x1f\x8b\x08\0\0\0", OK + b"Content-Encoding: gzip\r\n")) as (client, heads, _):
            assert await events(client) == []
            assert b"identity" in heads[0]

    asyncio.run(main())


def test_a_request_follows_no_redirect() -> None:
    """It would take the prompt to whatever address the answer names."""

    async def main() -> None:
        async with serving(plain(b"{}")) as (_, heads, url):
            moved = b"HTTP/1.1 307 Elsewhere\r\nContent-Length: 0\r\nLocation: %s/x\r\n\r\n" % url.encode()
            async with serving(moved) as (client, _, _):
                with pytest.raises(ReplicaLost, match="status 307"):
                    await client.ask({})
            assert heads == []

    asyncio.run(main())


def test_events_come_whole_however_they_are_cut() -> None:
    async def main() -> None:
        sent = CHUNKED + chunk(b'data: {"a": 1}\n\n: x\n\ndata: {"b"') + chunk(b": 2}\n\ndata: [DONE]\n\n") + b"0\r\n\r\n"
        async with serving(sent, at_once=False) as (client, _, _):
            assert await events(client) == [{"a": 1}, {"b": 2}]

    asyncio.run(main())


@pytest.mark.parametrize("status", [400, 401, 403, 422])
def test_a_refusal_names_the_request(status: int) -> None:
    async def main() -> None:
        async with serving(plain(b"no", b"HTTP/1.1 %d No\r\n" % status)) as (client, _, _):
            with pytest.raises(InvalidRequest):
                await client.ask({})

    asyncio.run(main())
