"""Web pages in a browser: which may use a router, and what is refused by the head alone."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.append(str(Path(__file__).parents[1]))  # the fake router of all tests of HTTP

from http_fakes import MODEL, FakeApi, served
from raw_http import Answer, connect, exchange, post, read_answer

from pdserve.config import RouterConfig
from pdserve.core.errors import ConfigError
from router.http import serve_http
from router.http.metrics import serve_metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

BODY: dict[str, Any] = {"model": MODEL, "prompt": "p"}
STREAM = {**BODY, "stream": True}
COMPLETIONS = "/v1/completions"
PAGE = "https://chat.example"


def request(method: str, path: str, host: str | None, body: bytes = b"", **headers: str) -> bytes:
    named = {"host": host, "content-length": str(len(body)), **{name.replace("_", "-"): text for name, text in headers.items()}}
    lines = [f"{name}: {value}" for name, value in named.items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + body


def completion(host: str = "localhost", **headers: str) -> bytes:
    return request("POST", COMPLETIONS, host, json.dumps(BODY).encode(), **headers)


@asynccontextmanager
async def anywhere(api: FakeApi, host: str = "0.0.0.0", **limits: Any) -> AsyncIterator[str]:
    """A fake router that other machines reach as well."""
    server = await serve_http(api, api.parser, host, 0, RouterConfig(**limits))
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await asyncio.wait_for(server.close(), 30)
        api.parser.close()


def refused(answer: Answer, setting: str) -> bool:
    return (answer.status, answer.error["code"]) == (403, "forbidden") and f"add it to {setting}" in answer.error["message"]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "", "a b"]
)
def test_a_name_that_a_page_pointed_at_loopback_was_served(host: str) -> None:
    async def run() -> None:
        api = FakeApi()
        async with served(api) as base:
            assert refused(await exchange(base, completion(host)), "router.allowed_hosts")
            assert refused(await exchange(base, request("GET", "/metrics", host)), "router.allowed_hosts")
        assert not api.requests

    asyncio.run(run())


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8000", "localhost.", "app.localhost:1", "127.0.0.1:9000", "127.1.2.3", "[::1]:8000", "[::1]",
     "192.168.0.7:8000", "host.docker.internal:8000", "host.containers.internal", "llm.example:443"],
)  # fmt: skip
def test_the_names_of_the_own_machine_and_those_of_the_settings_are_served_on_loopback(host: str) -> None:
    async def run() -> None:
        async with served(FakeApi(), allowed_hosts=["LLM.example"]) as base:
            assert (await exchange(base, completion(host))).status == 200

    asyncio.run(run())


def test_probes_services_and_ingresses_may_call_a_router_that_does_not_listen_on_loopback_by_any_name() -> None:
    async def run() -> None:
        names = ["pdserve-router.default.svc:8000", "10.0.0.7:8000", "llm.example"]
        async with anywhere(FakeApi()) as base:
            assert [(await exchange(base, completion(name))).status for name in names] == [200] * 3
        async with anywhere(FakeApi(), allowed_hosts=["llm.example"]) as base:  # unless its names are set
            assert [(await exchange(base, completion(name))).status for name in names] == [403, 200, 200]

    asyncio.run(run())


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://localhost:3000", "null", "https://chat.example.evil.example"]
)
@pytest.mark.parametrize("body_type", ["text/plain", "application/json"])
def test_any_web_page_could_use_a_local_router(origin: str, body_type: str) -> None:
    """A POST of type text/plain is one that a browser sends without asking first."""

    async def run() -> None:
        for serve in (served, anywhere):
            api = FakeApi()
            async with serve(api, allowed_origins=[PAGE]) as base:
                answer = await exchange(base, completion(origin=origin, content_type=body_type))
                assert refused(answer, "router.allowed_origins")
                assert "access-control-allow-origin" not in answer.headers
                asked = request("OPTIONS", COMPLETIONS, "localhost", origin=origin, access_control_request_method="POST")
                assert refused(await exchange(base, asked), "router.allowed_origins")
            assert not api.requests

    asyncio.run(run())


@pytest.mark.parametrize("allowed", [PAGE, "*"])
def test_an_allowed_page_is_answered_so_that_its_browser_shows_it_the_answer(allowed: str) -> None:
    """Also a stream, an error and a route without a body; on one connection, whose other requests are not concerned."""

    async def run() -> None:
        async with served(FakeApi(), allowed_origins=[allowed]) as base:
            reader, writer = await connect(base)
            asked = request(
                "OPTIONS", COMPLETIONS, "localhost", origin=PAGE, access_control_request_method="POST",
                access_control_request_headers="authorization,content-type",
            )  # fmt: skip
            writer.write(asked)
            preflight = await read_answer(reader)
            assert (preflight.status, preflight.body) == (204, b"")
            assert "post" in preflight.headers["access-control-allow-methods"]
            assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
            for sent, status in (
                (post(COMPLETIONS, BODY, origin=PAGE), 200),
                (post(COMPLETIONS, STREAM, origin=PAGE), 200),
                (post(COMPLETIONS, {"model": "other"}, origin=PAGE), 400),
                (request("GET", "/v1/models", "localhost", origin=PAGE), 200),
            ):
                writer.write(sent)
                answer = await read_answer(reader)
                assert (answer.status, answer.headers["access-control-allow-origin"]) == (status, allowed)
                assert answer.headers.get("vary") == (None if allowed == "*" else "origin")
                assert "x-request-id" in answer.headers["access-control-expose-headers"]
            writer.write(post(COMPLETIONS, BODY))
            assert not {"access-control-allow-origin", "vary"} & set((await read_answer(reader)).headers)
            writer.write(request("OPTIONS", COMPLETIONS, "localhost"))
            assert (await read_answer(reader)).status == 405
            writer.close()

    asyncio.run(run())


def test_a_page_of_the_router_itself_may_use_it() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            assert (await exchange(base, completion("localhost:8000", origin="http://localhost:8000"))).status == 200

    asyncio.run(run())


def test_the_port_of_metrics_has_the_same_door() -> None:
    async def run() -> None:
        server = await serve_metrics(FakeApi(), RouterConfig(metrics_port=0))
        assert server is not None
        base = f"http://127.0.0.1:{server.port}"
        assert (await exchange(base, request("GET", "/metrics", "127.0.0.1:9464"))).status == 200
        assert refused(await exchange(base, request("GET", "/metrics", "evil.example")), "router.allowed_hosts")
        await server.close()

    asyncio.run(run())


def test_entries_that_could_allow_nothing_are_refused() -> None:
    for origin in ("chat.example", "https://chat.example/", "https://a b", ""):
        with pytest.raises(ConfigError, match=r"router\.allowed_origins: each entry must be \*, null, or a scheme and a host"):
            RouterConfig(allowed_origins=(origin,))
    for host in ("llm.example:8000", "http://llm.example", ""):
        with pytest.raises(ConfigError, match=r"router\.allowed_hosts: each entry must be \* or a name without a port"):
            RouterConfig(allowed_hosts=(host,))
    RouterConfig(allowed_origins=("*", "null", "app://obsidian.md", "http://[::1]:3000"), allowed_hosts=("*", "my_box"))


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "identity, gzip"])
def test_a_compressed_body_was_called_invalid_json(encoding: str) -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            reader, writer = await connect(base)
            body = gzip.compress(json.dumps(BODY).encode())
            writer.write(request("POST", COMPLETIONS, "localhost", body, content_encoding=encoding))
            answer = await read_answer(reader)
            assert (answer.status, answer.headers["accept-encoding"]) == (415, "identity")
            assert "Content-Encoding" in answer.error["message"]
            writer.write(completion(content_encoding="identity"))
            assert (await read_answer(reader)).status == 200
            writer.close()

    asyncio.run(run())


def test_a_body_that_is_encoded_on_its_way_was_read_as_if_it_were_not() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            reader, writer = await connect(base)
            head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: gzip, chunked\r\n\r\n"
            writer.write(head.encode() + b"0\r\n\r\n")
            answer = await read_answer(reader)
            assert answer.status == 501
            assert "Transfer-Encoding" in answer.error["message"]
            writer.close()

    asyncio.run(run())
