"""Clients that mean harm, or seem to: each is told what limit it met, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from http_fakes import MODEL, FakeApi, served
from raw_http import TIMEOUT_S, Answer, connect, exchange, head, post, read_answer

import router.http.app
import router.http.reply
from router.http import protocol
from router.http.protocol import declined
from router.parsing.parser import FREE_BYTES, BodyBudget

BODY: dict[str, Any] = {"model": MODEL, "prompt": "p"}
COMPLETIONS = "/v1/completions"
OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\n"


async def flood(base: str, start: bytes, part: bytes) -> Answer:
    """Send without end, which the server must end; the answer that came before."""
    reader, writer = await connect(base)

    async def send() -> None:
        writer.write(start)
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    async with asyncio.timeout(TIMEOUT_S):
        sender = asyncio.create_task(send())
        answer = await read_answer(reader)
        with pytest.raises(ConnectionError):
            await sender
        writer.close()
    return answer


@pytest.fixture(autouse=True)
def brief_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "LINGER_S", 0.1)
    monkeypatch.setattr(router.http.reply, "LINGER_S", 0.1)


CHUNKED = b"POST %s HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nope"])
@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b"0\r\n", b"x: y\r\n" * 20_000),
        (b"0\r\nx: ", b"a" * 120_000),
        (b"2;x=", b"a" * 120_000),
    ],
    ids=["many trailers", "one trailer", "chunk extension"],
)
def test_endless_trailers_end_the_connection(path: bytes, start: bytes, part: bytes) -> None:
    """They were unbounded: 80 MB of them took 1.5 GiB of the router."""

    async def run() -> None:
        async with served(FakeApi()) as base:
            answer = await flood(base, CHUNKED % path + start, part)
            if (path, answer.status) != (b"/nope", 404):  # which does not wait for the body
                assert (answer.status, answer.error["code"]) == (431, "request_too_large")
                assert f"{protocol.MAX_TRAILER_BYTES} bytes" in answer.error["message"]
            assert (await exchange(base, post(COMPLETIONS, BODY))).status == 200

    asyncio.run(run())


def test_a_few_trailers_are_ignored_and_are_no_headers() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            body = json.dumps(BODY).encode()
            framed = head("POST", COMPLETIONS, transfer_encoding="chunked") + b"%x\r\n%s\r\n" % (len(body), body)
            answer = await exchange(base, framed + b"0\r\nX-Request-Id: trailed\r\n\r\n")
            assert (answer.status, answer.headers["x-request-id"] != "trailed") == (200, True)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("start", "part", "limit"),
    [
        (b"GET / HTTP/1.1\r\nx: ", b"y" * 65536, f"{protocol.MAX_HEAD_BYTES} bytes"),
        (b"GET /", b"y" * 65536, f"{protocol.MAX_HEAD_BYTES} bytes"),
        (b"GET / HTTP/1.1\r\n", b"a: b\r\n" * 10, f"{protocol.MAX_HEADERS} headers"),
        (b"GET / HTTP/1.1\r\n" + b"x: %s\r\n" % (b"y" * 70_000) + b"\r\n", b"", f"{protocol.MAX_HEAD_BYTES} bytes"),
    ],
    ids=["one header", "the path", "many headers", "all at once"],
)
def test_a_head_that_is_too_large_is_431_naming_the_limit(start: bytes, part: bytes, limit: str) -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            answer = await flood(base, start, part) if part else await exchange(base, start)
            assert (answer.status, answer.headers["connection"]) == (431, "close")
            assert limit in answer.error["message"]

    asyncio.run(run())


def test_a_body_that_stops_in_the_middle_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.http.reply, "SILENCE_S", 0.1)

    async def run() -> None:
        async with served(FakeApi()) as base:
            reader, writer = await connect(base)
            writer.write(head("POST", COMPLETIONS, content_length=100) + b"{")
            answer = await read_answer(reader)
            assert (answer.status, answer.error["code"], answer.headers["connection"]) == (408, "request_timeout", "close")
            assert "0.1 s" in answer.error["message"]
            writer.close()

    asyncio.run(run())


def test_large_bodies_share_a_budget_and_small_ones_get_in_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """(1) Two bodies hold nearly all of it; (2) a third is refused with a hint; (3) a small one is served; (4) when the two
    have left, there is room again."""

    budget = BodyBudget(2 << 20)
    monkeypatch.setattr(
        router.http.app, "BodyBudget", lambda max_bytes, what="body", *_: budget if what == "body" else BodyBudget(1 << 30)
    )
    monkeypatch.setattr(router.http.reply, "LINGER_S", 2.0)
    length = 1 << 20

    async def taken(expected_bytes: int) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while budget.taken_bytes != expected_bytes:  # noqa: ASYNC110 - bounded
                await asyncio.sleep(0.01)

    async def run() -> None:
        async with served(FakeApi(max_body_bytes=length)) as base:
            holders = [await connect(base) for _ in range(2)]
            for _, writer in holders:
                writer.write(head("POST", COMPLETIONS, content_length=length) + b" " * (length - 1))
                await writer.drain()
            await taken(2 * (length - FREE_BYTES))
            refused = await exchange(base, post(COMPLETIONS, b" " * length))
            assert (refused.status, refused.error["code"]) == (429, "overloaded")
            assert refused.headers["retry-after"] == "1"
            assert f"{2 << 20} bytes" in refused.error["message"]
            assert (await exchange(base, post(COMPLETIONS, BODY))).status == 200
            for _, writer in holders:
                writer.transport.abort()
            await taken(0)
            large = {**BODY, "user": "u" * (length - 100)}
            assert (await exchange(base, post(COMPLETIONS, large))).status == 200
            assert budget.taken_bytes == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    "behind",
    [
        head("GET", "/health") * (protocol.MAX_PIPELINED + 1),
        post(COMPLETIONS, b" " * protocol.MAX_BEHIND_BYTES),
        head("GET", "/health", x="y" * 60_000) * 5,
    ],
    ids=["many", "a large body", "large heads"],
)
def test_requests_piled_up_behind_one_end_the_connection(behind: bytes) -> None:
    async def run() -> None:
        api = FakeApi()
        api.gate.clear()
        async with served(api) as base:
            reader, writer = await connect(base)
            writer.write(post(COMPLETIONS, BODY) + behind)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
            writer.close()
            api.gate.set()

    asyncio.run(run())


def test_a_client_that_leaves_with_requests_piled_up_ends_the_one_that_runs() -> None:
    """The last that came was told, and the one that ran went on for nobody."""

    async def run() -> None:
        api = FakeApi()
        api.gate.clear()
        async with served(api) as base:
            _, writer = await connect(base)
            writer.write(post(COMPLETIONS, BODY) + post(COMPLETIONS, BODY) + head("GET", "/health"))
            async with asyncio.timeout(TIMEOUT_S):
                await api.submitted.wait()
                writer.transport.abort()
                await api.closed.wait()
            assert len(api.generations) == 1
            assert not api.generations[0].finished

    asyncio.run(run())


def test_thousands_of_offers_at_once_end_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        api = FakeApi()
        api.gate.clear()
        async with served(api) as base:
            reader, writer = await connect(base)
            offer = b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
            writer.write(post(COMPLETIONS, BODY) + offer * 3000)
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), TIMEOUT_S) == b""
            writer.close()

    asyncio.run(run())
    assert "Recursion" not in caplog.text


@pytest.mark.parametrize("split", [False, True], ids=["one packet", "body in a second packet"])
@pytest.mark.parametrize("framing", ["content-length", "chunked"])
def test_a_client_that_offers_http2_is_served_in_http1(split: bool, framing: str) -> None:
    """As Java's HttpClient and `curl --http2` do with every first request. It got 400: the body was lost. The connection
    serves what follows, and offers again."""

    async def run() -> None:
        api = FakeApi()
        async with served(api) as base:
            reader, writer = await connect(base)
            body = json.dumps({**BODY, "prompt": "hello"}).encode()
            how = b"content-length: %d" % len(body) if framing == "content-length" else b"transfer-encoding: chunked"
            sent = body if framing == "content-length" else b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
            start = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + OFFER + how + b"\r\n\r\n"
            for _ in range(2):
                if split:
                    writer.write(start)
                    await asyncio.sleep(0.05)
                    writer.write(sent)
                else:
                    writer.write(start + sent)
                assert (await read_answer(reader)).status == 200
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + OFFER + b"\r\n" + head("GET", "/"))
            assert [(await read_answer(reader)).status for _ in range(2)] == [200, 200]
            writer.close()
        assert [request.prompt for request in api.requests] == ["hello", "hello"]

    asyncio.run(run())


def test_other_offers_are_declined_and_a_tunnel_is_refused() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            websocket = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
            assert (await exchange(base, websocket)).status == 200
            tunnel = await exchange(base, b"CONNECT example.org:443 HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (tunnel.status, tunnel.error["code"]) == (405, "method_not_allowed")
            garbage = await exchange(base, b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
            assert (garbage.status, garbage.error["type"]) == (400, "invalid_request_error")

    asyncio.run(run())


def test_what_is_declined_is_the_offer_alone() -> None:
    headers = [
        (b"connection", b"Upgrade, close, HTTP2-Settings"),
        (b"upgrade", b"h2c"),
        (b"http2-settings", b"AA"),
        (b"a", b"b"),
    ]
    assert declined(b"GET", b"/x?y", "1.1", headers) == b"GET /x?y HTTP/1.1\r\nconnection: close\r\na: b\r\n\r\n"
    assert declined(b"GET", b"/", "1.0", [(b"connection", b"upgrade")]) == b"GET / HTTP/1.0\r\n\r\n"
