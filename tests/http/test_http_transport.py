"""Connections: who leaves when, what is bounded, and what is left afterwards."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
import uvloop
from http_fakes import MODEL, FakeApi, served
from raw_http import Answer, connect, exchange, head, post, read_answer

import router.http.protocol
import router.http.reply
from pdserve import __version__
from pdserve.core.errors import ConfigError, ReplicaLost
from router.api.request import DetokenizeInput, TokenizeInput
from router.http import serve_http
from router.parsing.parser import INLINE_BYTES, Job, Parsed, RequestParser

BODY: dict[str, Any] = {"model": MODEL, "prompt": "p"}
STREAM = {**BODY, "stream": True}
COMPLETIONS = "/v1/completions"
SMALL, LARGE = head("GET", "/health"), post(COMPLETIONS, b"x" * 200_000)[:-1]  # requests that wait behind another one


def test_information_routes() -> None:
    async def run() -> None:
        api = FakeApi()
        async with served(api) as base:
            assert (await exchange(base, head("GET", "/"))).json == {
                "service": "pdserve",
                "version": __version__,
                "model": MODEL,
            }
            assert (await exchange(base, head("GET", "/health"))).status == 200
            metrics = await exchange(base, head("GET", "/metrics"))
            assert metrics.body == await api.metrics_page(per_worker=False)
            assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
            api.ready = False
            unready = await exchange(base, head("GET", "/health"))
            assert (unready.status, unready.json["status"]) == (503, "unavailable")
            assert unready.json["reason"]

    asyncio.run(run())


def test_wrong_paths_and_methods_have_openais_shape() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            for path in ("/v1/nothing", "/v1/completions/", "/%00"):
                missing = await exchange(base, head("GET", path))
                assert (missing.status, missing.error["code"]) == (404, "not_found")
            wrong = await exchange(base, head("GET", COMPLETIONS))
            assert (wrong.status, wrong.error["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "post")

    asyncio.run(run())


def test_a_long_path_makes_no_long_error() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            missing = await exchange(base, head("GET", "/" + "x" * 20_000))
            assert missing.status == 404
            assert missing.error["message"].endswith("x...: Not Found; GET /docs lists all routes")
            assert len(missing.body) < 1_000

    asyncio.run(run())


def test_a_request_keeps_its_clients_id_and_has_one_of_its_own_also_when_it_fails() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            for payload, status in ((BODY, 200), (STREAM, 200), ({**BODY, "model": "other"}, 404)):
                answer = await exchange(base, post(COMPLETIONS, payload, X_Request_Id="abc-1"))
                assert (answer.status, answer.headers["x-request-id"]) == (status, "abc-1")
                assert len(answer.headers["pdserve-request-id"]) == 32
                assert "date" in answer.headers
            unnamed = await exchange(base, post(COMPLETIONS, BODY))
            assert unnamed.headers["x-request-id"] == unnamed.headers["pdserve-request-id"]

    asyncio.run(run())


def test_a_stream_ends_with_done_and_one_with_a_bug_with_an_error_that_does_not_quote_it() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            good = await exchange(base, post(COMPLETIONS, STREAM))
        assert good.body.endswith(b"data: [DONE]\n\n")
        async with served(FakeApi(error=KeyError("bug"), fail_at=3)) as base:
            bad = await exchange(base, post(COMPLETIONS, STREAM))
        assert bad.status == 200
        assert b"[DONE]" not in bad.body
        last = json.loads(bad.body.strip().split(b"\n\n")[-1].removeprefix(b"data: "))
        assert last["error"]["type"] == "server_error"
        assert "KeyError" not in last["error"]["message"]

    asyncio.run(run())


def test_a_bug_is_an_openai_shaped_500() -> None:
    async def run() -> None:
        async with served(FakeApi(error=KeyError("bug"))) as base:
            answer = await exchange(base, post(COMPLETIONS, BODY))
        assert (answer.status, answer.error["code"]) == (500, "internal_bug")
        assert "bug" not in answer.error["message"].replace("internal_bug", "")

    asyncio.run(run())


def test_one_failed_prompt_cancels_the_others() -> None:
    async def run() -> None:
        api = FakeApi(error=ReplicaLost("gone"), fail_at=2)
        async with served(api) as base:
            answer = await exchange(base, post(COMPLETIONS, {**BODY, "prompt": ["a", "b", "c"]}))
            assert (answer.status, answer.error["message"]) == (503, "gone")
            assert len(api.generations) == 3
            assert all(generation.closed for generation in api.generations)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("payload", "size", "framing", "behind"),
    [
        (BODY, 0, "length", b""),
        (STREAM, 0, "length", SMALL),
        (BODY, 0, "chunked", LARGE),
        ({**STREAM, "prompt": ["a", "b"]}, 0, "chunked", b""),
        (STREAM, 100_000, "chunked", SMALL),
        (BODY, 1_000_000, "length", b""),
        (BODY, 100_000, "expect", LARGE),
        (STREAM, 1_000_000, "chunked", b""),
    ],
)
def test_a_client_that_leaves_while_waiting_is_cancelled_at_once(
    payload: dict[str, Any], size: int, framing: str, behind: bytes
) -> None:
    """Also when uvicorn would not read the connection, because of a large body or of a request that waits behind. The loop is
    that of a real router."""

    async def run() -> None:
        api = FakeApi()
        api.gate.clear()
        async with served(api) as base:
            reader, writer = await connect(base)
            await send_body(reader, writer, json.dumps({**payload, "pad": "x" * size}).encode(), framing)
            async with asyncio.timeout(60):
                await api.submitted.wait()
                writer.write(behind)
                writer.transport.close()
                await api.closed.wait()
            assert not any(generation.finished for generation in api.generations)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def send_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes, framing: str) -> None:
    """Send a completion in one of the framings of HTTP/1.1."""
    if framing == "length":
        writer.write(post(COMPLETIONS, body))
    elif framing == "expect":
        writer.write(head("POST", COMPLETIONS, content_length=len(body), expect="100-continue"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(body)
    else:
        writer.write(head("POST", COMPLETIONS, transfer_encoding="chunked"))
        for part in (body[:70_000], body[70_000:]):
            writer.write(b"%x\r\n%b\r\n" % (len(part), part) if part else b"")
        writer.write(b"0\r\n\r\n")


@pytest.mark.parametrize(("path", "size"), [("/tokenize", 0), ("/tokenize", 100_000), ("/detokenize", 0)])
def test_a_client_that_leaves_while_its_text_is_converted_gives_up_its_turn(path: str, size: int) -> None:
    class Busy(FakeApi):
        """Its one turn for texts never comes."""

        async def tokenize(self, asked: TokenizeInput) -> tuple[int, ...]:
            self.submitted.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.closed.set()
            raise AssertionError

        async def detokenize(self, asked: DetokenizeInput) -> str:
            return "".join(map(str, await self.tokenize(TokenizeInput(None, ""))))

    async def run() -> None:
        api = Busy()
        async with served(api) as base:
            _, writer = await connect(base)
            body = {"prompt": "x"} if path == "/tokenize" else {"tokens": [1], "model": MODEL}
            writer.write(post(path, json.dumps(body).encode() + b" " * size) + head("GET", "/health"))
            async with asyncio.timeout(60):
                await api.submitted.wait()
                writer.transport.close()
                await api.closed.wait()

    asyncio.run(run())


def test_a_client_that_leaves_while_its_large_body_waits_to_be_read_gives_up_its_turn() -> None:
    """Else whoever sends large bodies and goes keeps the clients behind it waiting."""

    class Busy(RequestParser):
        began, left = asyncio.Event(), asyncio.Event()

        async def parse(self, job: Job) -> Parsed:
            self.began.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
            raise AssertionError

    async def run() -> None:
        busy = Busy(8 << 20)
        async with served(FakeApi(parser=busy)) as base:
            _, writer = await connect(base)
            writer.write(post(COMPLETIONS, {**BODY, "user": "u" * INLINE_BYTES}))
            async with asyncio.timeout(60):
                await busy.began.wait()
                writer.transport.abort()
                await busy.left.wait()

    asyncio.run(run())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_refused_before_it_is_read(chunked: bool) -> None:
    """The client goes on sending 100 MB and still gets the answer."""

    async def run() -> None:
        async with served(FakeApi(max_body_bytes=1000)) as base:
            reader, writer = await connect(base)
            part = b"x" * 100_000
            framing = {"transfer_encoding": "chunked"} if chunked else {"content_length": len(part) * 1000}
            writer.write(head("POST", COMPLETIONS, **framing))

            async def send() -> None:
                try:
                    for _ in range(1000):
                        writer.write(b"%x\r\n%s\r\n" % (len(part), part) if chunked else part)
                        await writer.drain()
                except ConnectionError:
                    pass  # the answer is there; what the client still sends is its own affair

            sender = asyncio.create_task(send())
            answer = await read_answer(reader)
            assert (answer.status, answer.error["param"], answer.headers["connection"]) == (413, "body", "close")
            assert "1000" in answer.error["message"]
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            writer.close()
            assert (await exchange(base, post(COMPLETIONS, BODY))).status == 200

    asyncio.run(run())


def test_a_client_that_asks_before_sending_is_refused_without_sending() -> None:
    async def run() -> None:
        async with served(FakeApi(max_body_bytes=1000)) as base:
            answer = await exchange(base, head("POST", COMPLETIONS, content_length=10**12, expect="100-continue"))
            assert answer.status == 413
            reader, writer = await connect(base)
            body = json.dumps(BODY).encode()
            writer.write(head("POST", COMPLETIONS, content_length=len(body), expect="100-continue"))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
            writer.write(body)
            assert (await read_answer(reader)).status == 200
            writer.close()

    asyncio.run(run())


def test_one_connection_serves_many_requests_also_pipelined() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base:
            reader, writer = await connect(base)
            writer.write(post(COMPLETIONS, BODY) + post(COMPLETIONS, STREAM) + head("GET", "/health") + post(COMPLETIONS, b"{"))
            answers: list[Answer] = [await read_answer(reader) for _ in range(4)]
            assert [answer.status for answer in answers] == [200, 200, 200, 400]
            writer.close()

    asyncio.run(run())


def test_a_body_that_drips_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router.http.reply, "BODY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(router.http.reply, "LINGER_S", 0.1)

    async def run() -> None:
        async with served(FakeApi()) as base:
            reader, writer = await connect(base)
            writer.write(head("POST", COMPLETIONS, content_length=100) + b"{")
            answer = await read_answer(reader)
            assert (answer.status, answer.headers["connection"]) == (408, "close")
            assert await asyncio.wait_for(reader.read(), 60) == b""
            writer.close()

    asyncio.run(run())


def test_a_head_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who said nothing at all is hung up on; who began is told why."""
    monkeypatch.setattr(router.http.protocol, "HEAD_TIMEOUT_S", 0.2)

    async def run() -> None:
        async with served(FakeApi()) as base:
            reader, writer = await connect(base)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), 60)
            writer.close()
            monkeypatch.setattr(
                router.http.protocol, "HEAD_TIMEOUT_S", 2.5
            )  # it begins to speak before that, even if it stands still
            reader, writer = await connect(base)
            writer.write(b"GET / HTTP/1.1\r\nx: ")
            answer = await read_answer(reader)
            assert (answer.status, answer.error["code"], answer.headers["connection"]) == (408, "request_timeout", "close")
            assert "2.5 s" in answer.error["message"]
            writer.close()

    asyncio.run(run())


def test_a_client_that_takes_nothing_is_dropped() -> None:
    """What it was sent fills its window, then the server's buffer; the kernel ends the connection."""

    async def run() -> None:
        api = FakeApi(words=("w" * 100_000,) * 10_000)
        async with served(api, stalled_client_s=0.5) as base:
            host, port = base.removeprefix("http://").split(":")
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                await asyncio.to_thread(sock.connect, (host, int(port)))
                sock.sendall(post(COMPLETIONS, {**STREAM, "max_tokens": 10_000}))
                await asyncio.wait_for(api.closed.wait(), 60)
            assert not api.generations[0].finished

    asyncio.run(run())


def test_close_tells_running_streams() -> None:
    async def run() -> None:
        api = FakeApi(words=("w",) * 10)
        api.gate.clear()
        server = await serve_http(api, api.parser, "127.0.0.1", 0)
        base = f"http://127.0.0.1:{server.port}"
        reader, writer = await connect(base)
        writer.write(post(COMPLETIONS, BODY))
        idle = await connect(base)
        await asyncio.wait_for(api.submitted.wait(), 60)
        closing = asyncio.create_task(server.close(grace_s=0.1))
        answer = await read_answer(reader)
        assert (answer.status, answer.error["code"], answer.headers["retry-after"]) == (503, "unavailable", "1")
        await asyncio.wait_for(closing, 60)
        assert api.generations[0].closed
        assert await asyncio.wait_for(idle[0].read(), 60) == b""
        await server.close()
        with pytest.raises(ConnectionError):
            await connect(base)
        writer.close()
        idle[1].close()
        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    asyncio.run(run())


def test_addresses_that_cannot_be_had_name_their_flag() -> None:
    async def run() -> None:
        api = FakeApi()
        server = await serve_http(api, api.parser, "127.0.0.1", 0)
        try:
            with pytest.raises(ConfigError, match=f"--http-port: port {server.port}"):
                await serve_http(api, api.parser, "127.0.0.1", server.port)
            with pytest.raises(ConfigError, match="--host"):
                await serve_http(api, api.parser, "192.0.2.1", 0)
        finally:
            await server.close()

    asyncio.run(run())
