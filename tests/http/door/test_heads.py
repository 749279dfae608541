"""Heads that HTTP does not allow, old versions of HTTP, and the ids of requests that could not be read."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # the fake router of all tests of HTTP

from http_fakes import MODEL, FakeApi, served
from raw_http import connect, exchange, head, post

BODY = json.dumps({"model": MODEL, "prompt": "p", "stream": True}).encode()


@pytest.mark.parametrize(
    ("start", "status"),
    [
        (b"GET / HTTP/1.1\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n", 400),
        (b"GET / HTTP/1.0\r\nhost: localhost\r\nhost: evil.example\r\n", 400),
        (b"GET / HTTP/2.0\r\nhost: localhost\r\n", 505),
        (b"GET / HTTP/1.0\r\n", 200),
    ],
)
def test_a_head_with_another_number_of_hosts_or_another_version_was_served(start: bytes, status: int) -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            answer = await exchange(base, start + b"\r\n")
            assert (answer.status, answer.headers["connection"]) == (status, "close")
            if status == 505:
                assert "HTTP/2.0" in answer.error["message"]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("start", "field"),
    [
        (b"content-length: abc", "Content-Length"),
        (b"content-length: -1", "Content-Length"),
        (b"content-length: %d" % 10**30, "Content-Length"),
        (b"content-length: 3\r\ncontent-length: 4", "Content-Length"),
        (b"content-length: 3\r\ntransfer-encoding: chunked", "Transfer-Encoding"),
        (b"transfer-encoding: chunked\r\n\r\nzz", "chunk size"),
        (b"a b: c", "header"),
    ],
)
def test_a_wrong_length_of_a_body_was_not_named(start: bytes, field: str) -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            answer = await exchange(base, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + start + b"\r\n\r\n")
            assert (answer.status, answer.headers["connection"]) == (400, "close")
            assert field in answer.error["message"]

    asyncio.run(run())


@pytest.mark.parametrize("version", ["", "/versions/1"])
@pytest.mark.parametrize("name", ["infer", "generate", "generate_stream"])
def test_a_get_of_a_request_was_that_of_a_model_of_this_name(name: str, version: str) -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            answer = await exchange(base, head("GET", f"/v2/models/{MODEL}{version}/{name}"))
            assert (answer.status, answer.headers["allow"], answer.json["code"]) == (405, "post", "method_not_allowed")

    asyncio.run(run())


def test_a_client_of_http_1_0_was_sent_chunks() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            reader, writer = await connect(base)
            writer.write(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY))
            start, _, body = (await asyncio.wait_for(reader.read(), 60)).partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in start.lower()
            assert body.startswith(b"data: {")
            assert body.endswith(b"data: [DONE]\n\n")
            writer.close()

    asyncio.run(run())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"{", b" " * 2000], ids=["no JSON", "too large"])
def test_an_error_about_a_body_that_was_not_read_had_no_id(path: str, body: bytes) -> None:
    async def run() -> None:
        async with served(FakeApi(max_body_bytes=1000)) as base:
            answer = await exchange(base, post(path, body, X_Request_Id="mine-1"))
            assert (answer.status in (400, 413), answer.headers["x-request-id"]) == (True, "mine-1")
            assert len((await exchange(base, post(path, body))).headers["x-request-id"]) == 32

    asyncio.run(run())
