"""The HTTP target against scripted servers, good and hostile ones. Every failure is a reason and no exception."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

import pytest
import uvloop

from pdserve.core.errors import ConfigError
from pdserve_bench.load import target as reasons
from pdserve_bench.load.http_target import MAX_LINE_BYTES, BaseUrl, HttpOptions, HttpTarget, ask_server
from pdserve_bench.load.target import LoadAnswer, LoadCall, RequestOptions
from tests.bench.load.http_server import GOOD, HANG_UP, Seen, ask, chunked, event, scripted_server, sse_head, token, whole

CALL = LoadCall(0, (1, 2, 3), 4)


def answers_to(
    parts: Sequence[bytes], calls: Sequence[LoadCall] = (CALL,), http: HttpOptions | None = None
) -> tuple[list[LoadAnswer], Seen]:
    async def run() -> tuple[list[LoadAnswer], Seen]:
        async with scripted_server(lambda number: parts) as (url, seen):
            return await ask(url, calls, http), seen

    return uvloop.run(run())  # as the command does; the other tests run on asyncio's own loop


def test_answers_are_read_and_connections_are_kept() -> None:
    answers, seen = answers_to(GOOD, [CALL, CALL, CALL])
    assert [answer.error for answer in answers] == ["", "", ""]
    assert seen.connections == 1
    answer = answers[0]
    assert (answer.prompt_tokens, answer.output_tokens, "".join(answer.texts)) == (5, 3, "abc")
    assert [count for _, count in answer.arrivals] == [1, 1, 1]
    assert answer.ended_s >= answer.arrivals[-1][0]
    assert seen.bodies[0] == {
        "model": "m",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_chat_sends_text_as_a_message() -> None:
    chunks = [event(choices=[{"delta": {"role": "assistant", "content": ""}}]), event(choices=[{"delta": {"content": "hi"}}])]
    parts = [sse_head(), chunked(b"".join(chunks) + b"data: [DONE]\n\n") + b"0\r\n\r\n"]
    (good, bad), seen = answers_to(parts, [LoadCall(0, "hello", 4), CALL], HttpOptions(chat=True))
    assert (good.error, "".join(good.texts), len(good.arrivals)) == ("", "hi", 1)
    assert seen.bodies[0]["messages"] == [{"role": "user", "content": "hello"}]
    assert seen.heads[0].startswith(b"POST /v1/chat/completions ")
    assert bad.error == reasons.CHAT_NEEDS_TEXT


def test_our_router_gets_class_and_session_and_says_how_it_served() -> None:
    report = {"request_id": "r", "placement": "disaggregated", "decode_worker": "d0", "kv_bytes": 7, "unknown": [1]}
    last = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2}, pdserve=report)
    counted = [token("a", usage={"prompt_tokens": 3, "completion_tokens": n}) for n in (0, 2)]
    parts = [sse_head(), chunked(b"".join(counted) + last + b"data: [DONE]\n\n") + b"0\r\n\r\n"]
    http = HttpOptions(ours=True, continuous_usage=True, api_key="secret")
    (answer,), seen = answers_to(parts, [LoadCall(0, "x", 4, "chat", "s-1")], http)
    assert (answer.error, [count for _, count in answer.arrivals]) == ("", [2])
    assert (answer.served.request_id, answer.served.placement, answer.served.kv_bytes) == ("r", "disaggregated", 7)
    for line in (b"X-Slo-Class: chat", b"X-Session-Id: s-1", b"Authorization: Bearer secret"):
        assert line in seen.heads[0].split(b"\r\n")


LONG = b"x" * (MAX_LINE_BYTES // 4)
HOSTILE: dict[str, tuple[list[bytes], str]] = {
    "error with a code": ([whole(b"429 Too Many", b'{"error": {"code": "overloaded"}}')], "overloaded"),
    "error with a number": ([whole(b"400 Bad", b'{"error": {"code": 400}}')], "http_400"),
    "error that is no JSON": ([whole(b"502 Bad Gateway", b"<html>")], "http_502"),
    "error with a hostile code": ([whole(b"500 Bad", b'{"error": {"code": "\\u001b[31m"}}')], "http_500"),
    "redirect": ([b"HTTP/1.1 307 Go\r\nLocation: http://evil/\r\nContent-Length: 0\r\n\r\n"], reasons.REDIRECTED),
    "no HTTP": ([b"SSH-2.0-OpenSSH_9.6\r\n"], reasons.BAD_HTTP),
    "another protocol": ([b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], reasons.BAD_HTTP),
    "endless head": ([b"HTTP/1.1 200 OK\r\n", *[b"X-A: " + b"y" * 4000 + b"\r\n"] * 40], reasons.HEAD_TOO_LONG),
    "endless trailers": ([sse_head(), b"0\r\n", *[b"X-A: " + b"y" * 4000 + b"\r\n"] * 40], reasons.BAD_HTTP),
    "bad chunk": ([sse_head(), b"zz\r\n"], reasons.BAD_HTTP),
    "nothing": ([HANG_UP], reasons.BROKEN_STREAM),
    "ends in the head": ([b"HTTP/1.1 200", HANG_UP], reasons.BROKEN_STREAM),
    "ends in the middle": ([*GOOD[:2], HANG_UP], reasons.BROKEN_STREAM),
    "ends well but too early": ([*GOOD[:2], b"0\r\n\r\n"], reasons.BROKEN_STREAM),
    "whole JSON in place of a stream": ([whole(b"200 OK", b'{"choices": [{"text": "a"}]}')], reasons.BROKEN_STREAM),
    "bad JSON": ([sse_head(), chunked(b"data: {\n\n")], reasons.BAD_JSON),
    "JSON of another form": ([sse_head(), chunked(b"data: [1]\n\n")], reasons.BAD_JSON),
    "bad UTF-8": ([sse_head(), chunked(b'data: {"choices": [{"text": "\xff"}]}\n\n')], reasons.BAD_JSON),
    "deep JSON": ([sse_head(), chunked(b'data: {"x":' + b"[" * 100_000 + b"\n\n")], reasons.BAD_JSON),
    "endless line": ([sse_head(), *[chunked(LONG)] * 5], reasons.LINE_TOO_LONG),
    "long line": ([sse_head(), *[chunked(LONG)] * 4, chunked(b"x\n")], reasons.LINE_TOO_LONG),
    "too many tokens": ([sse_head(), *[chunked(token("x"))] * 30], reasons.TOO_MANY_TOKENS),
    "too many tokens in the usage": (
        [sse_head(), chunked(token("x", usage={"completion_tokens": 10**30}))],
        reasons.TOO_MANY_TOKENS,
    ),
    "error in the stream": ([*GOOD[:2], chunked(event(error={"code": "replica_lost"})) + b"0\r\n\r\n"], "replica_lost"),
    "second answer": ([*GOOD[:4], GOOD[4] + whole(b"302 Found", b"")], ""),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_server_is_a_reason(case: str) -> None:
    parts, reason = HOSTILE[case]
    (answer,), _ = answers_to(parts)
    assert answer.error == reason


def test_answer_may_end_with_its_connection() -> None:
    parts = [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", token("a"), b"data: [DONE]\r\n\r\n", HANG_UP]
    answers, seen = answers_to(parts, [CALL, CALL])
    assert [answer.error for answer in answers] == ["", ""]
    assert seen.connections == 2


def test_connection_that_the_server_closed_meanwhile_is_replaced() -> None:
    """The server closes a kept connection just before the second request arrives on it. It is sent again on a new one."""

    async def run() -> None:
        async with scripted_server(lambda number: [HANG_UP] if number == 1 else GOOD) as (url, seen):
            first, second = await ask(url, [CALL, CALL])
            assert (first.error, second.error) == ("", "")
            assert (seen.connections, len(seen.heads)) == (2, 3)

    asyncio.run(run())


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    (answer,) = asyncio.run(ask(BaseUrl.parse(f"http://127.0.0.1:{port}"), [CALL]))
    assert answer.error == reasons.CONNECTION_REFUSED
    with pytest.raises(ConfigError, match="does not answer"):
        asyncio.run(ask_server(BaseUrl.parse(f"http://127.0.0.1:{port}")))


def test_cancelled_call_closes_its_connection() -> None:
    async def run() -> None:
        async with scripted_server(lambda number: GOOD[:2]) as (url, _):
            target = HttpTarget(url, RequestOptions(), HttpOptions())
            answer = LoadAnswer()
            task = asyncio.create_task(target.send(CALL, answer))
            while not answer.arrivals:  # noqa: ASYNC110 - the test times out
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not target._connections._open
            await target.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("parts", "model", "ours"),
    [
        ([whole(b"200 OK", b'{"data": [{"id": "m", "owned_by": "pdserve"}]}')], "m", True),
        ([whole(b"200 OK", b'{"data": [{"id": "m"}]}')], "m", False),
        ([whole(b"404 None", b"{}")], "", False),
        ([whole(b"200 OK", b"[[[")], "", False),
    ],
)
def test_server_says_who_it_is(parts: list[bytes], model: str, ours: bool) -> None:
    async def run() -> None:
        async with scripted_server(lambda number: parts) as (url, _):
            info = await ask_server(url)
            assert (info.model, info.ours, info.knows_continuous_usage) == (model, ours, ours)

    asyncio.run(run())


def test_urls() -> None:
    assert BaseUrl.parse("http://h:8000/v1/") == BaseUrl(False, "h", 8000, "")
    assert BaseUrl.parse("https://h/api") == BaseUrl(True, "h", 443, "/api")
    assert BaseUrl.parse("http://[::1]:1").authority == "[::1]:1"
    for wrong in ("h:8000", "ftp://h", "http://", "http://h:99999", "http://h/?q", "http://u:p@h", "http://h/\r\nX: y"):
        with pytest.raises(ConfigError, match=r"^base-url: "):
            BaseUrl.parse(wrong)
