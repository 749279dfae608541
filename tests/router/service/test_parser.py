"""Large requests, read elsewhere: the same results and refusals, and a child that may die, hang or grow."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from pdserve.core.errors import InternalBug, InvalidRequest, Overloaded
from pdserve.rpc.v1 import inference_pb2
from router.api.request import ChatMessage
from router.parsing import parser
from router.parsing.parser import INLINE_BYTES, Job, JobKind, Parsed, RequestParser, parse
from testkit.footprint import footprint

PAD = "u" * INLINE_BYTES
LIMIT = 100
READY = "import sys; sys.stdout.buffer.write(bytes(8)); sys.stdout.flush()"


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story

    asyncio.run(bounded())


@asynccontextmanager
async def parser_of(*command: str) -> AsyncIterator[RequestParser]:
    made = RequestParser(8 << 20, command) if command else RequestParser(8 << 20)
    try:
        yield made
    finally:
        made.close()


def job(kind: JobKind, body: Any, **fields: Any) -> Job:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Job(kind, data, LIMIT, **fields)


def generate(**fields: Any) -> bytes:
    request = inference_pb2.GenerateRequest(cache_salt=PAD, **fields)
    return request.SerializeToString()


def without_id(parsed: Any) -> str:
    return str(parsed).replace(getattr(parsed, "request_id", None) or "-", "ID")


GOOD = [
    job(JobKind.COMPLETION, {"prompt": [[1, 2], [3]], "user": PAD, "logit_bias": {"1": 2.5}, "stop": ["a"]}, header_id="h"),
    job(JobKind.COMPLETION, {"prompt": "é" * INLINE_BYTES}),
    job(JobKind.CHAT, {"messages": [{"role": "user", "content": PAD}], "stream": True}),
    Job(JobKind.GENERATE, generate(tokens=inference_pb2.TokenPrompt(ids=range(LIMIT))), LIMIT, max_deadline_s=60.0),
    Job(JobKind.GENERATE, generate(text="hello"), LIMIT, call_remaining_s=5.0, max_deadline_s=60.0),
    Job(JobKind.TOKENIZE, inference_pb2.TokenizeRequest(text=PAD * 2).SerializeToString(), LIMIT),
]
BAD = {
    "no JSON": (job(JobKind.COMPLETION, b"{" * 70_000), "body"),
    "too many ids": (job(JobKind.COMPLETION, {"prompt": [1] * 50_000}), "prompt"),
    "too many ids in one of several": (job(JobKind.COMPLETION, {"prompt": [[1], [1] * 50_000]}), "prompt[1]"),
    "too many stop strings": (job(JobKind.COMPLETION, {"prompt": "p", "stop": [""] * 50_000}), "stop"),
    "too many stop ids": (job(JobKind.COMPLETION, {"prompt": "p", "stop_token_ids": [1] * 50_000}), "stop_token_ids"),
    "too many parts": (
        job(JobKind.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 5000}]}),
        "messages[0].content",
    ),
    "too many ids over gRPC": (Job(JobKind.GENERATE, generate(tokens={"ids": [1] * 50_000}), LIMIT), "prompt"),
    "too many messages over gRPC": (Job(JobKind.GENERATE, generate(chat={"messages": [{}] * 5000}), LIMIT), "messages"),
    "too many stops over gRPC": (
        Job(JobKind.GENERATE, generate(text="p", sampling={"stop": [""] * 50_000}), LIMIT),
        "stop",
    ),
    "too many stop ids over gRPC": (
        Job(JobKind.GENERATE, generate(text="p", sampling={"stop_token_ids": [1] * 50_000}), LIMIT),
        "stop_token_ids",
    ),
    "too many biases over gRPC": (
        Job(JobKind.GENERATE, generate(text="p", sampling={"logit_bias": dict.fromkeys(range(301), 1.0)}), LIMIT),
        "logit_bias",
    ),
    "no message": (Job(JobKind.GENERATE, b"\xff" * 50_000, LIMIT), "request"),
}


def test_what_the_child_reads_is_what_the_loop_would_have_read() -> None:
    async def story() -> None:
        async with parser_of() as made:
            for one in GOOD:
                assert len(one.data) > INLINE_BYTES
                assert without_id(await made.parse(one)) == without_id(parse(one))
            for name, (one, field) in BAD.items():
                with pytest.raises(InvalidRequest) as inline:
                    parse(one)
                with pytest.raises(InvalidRequest) as far:
                    await made.parse(one)
                assert (far.value.field, far.value.message) == (field, inline.value.message), name

    run(story())


def test_small_requests_start_no_process() -> None:
    async def story() -> None:
        async with parser_of() as made:
            await made.parse(job(JobKind.CHAT, {"messages": [{"role": "user", "content": "hi"}]}))
            assert made.child_pid is None
            parsed: Parsed = await made.parse(GOOD[2])
            assert parsed.inputs[0].prompt == (ChatMessage("user", PAD),)  # type: ignore[union-attr]
            pid = made.child_pid
            assert psutil.Process(pid).cmdline()[0] == "pdserve: parse"
            await made.parse(GOOD[0])
            assert made.child_pid == pid
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)

    run(story())


def test_a_child_that_dies_fails_its_request_alone() -> None:
    async def story() -> None:
        async with parser_of() as made:
            await made.parse(GOOD[0])
            first = psutil.Process(made.child_pid)
            made._child._command = (sys.executable, "-c", f"{READY}; sys.stdin.buffer.read(1)")
            first.kill()
            while first.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110 - bounded by `run`
                await asyncio.sleep(0.01)
            with pytest.raises(InternalBug, match="large requests ended"):
                await made.parse(GOOD[0])
            made._child._command = RequestParser(8 << 20)._child._command
            assert await made.parse(GOOD[1])

    run(story())


def test_a_child_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser, "PARSE_TIMEOUT_S", 0.3)

    async def story() -> None:
        async with parser_of(sys.executable, "-c", f"{READY}; import time; time.sleep(60)") as made:
            with pytest.raises(Overloaded, match=r"0\.3 s"):
                await made.parse(GOOD[0])
            assert made.child_pid is None

    run(story())


def test_what_a_body_took_is_given_back() -> None:
    """8 MiB of empty lists take 200 MiB while they are read."""

    async def story() -> None:
        async with parser_of() as made:
            lists = b'{"prompt":[' + b"[]," * ((8 << 20) // 3 - 16) + b"[]]}"
            for _ in range(2):
                with pytest.raises(InvalidRequest, match="prompt: holds 2796187 prompts"):
                    await made.parse(Job(JobKind.COMPLETION, lists, LIMIT))
            assert footprint(made.child_pid or 0).rss_bytes < 150 << 20

    run(story())


def test_a_body_that_would_take_all_memory_is_refused() -> None:
    async def story() -> None:
        async with parser_of() as made:
            # A process for no bytes at all: what there is, is for Python itself.
            made._child._command = (*made._child._command[:-1], "0")
            with pytest.raises(InvalidRequest, match="body: takes too much memory"):
                await made.parse(Job(JobKind.COMPLETION, b'{"prompt":[' + b"[]," * (24 << 20) + b"[]]}", LIMIT))
            assert await made.parse(GOOD[0])

    run(story())


def test_closing_ends_who_waits() -> None:
    async def story() -> None:
        async with parser_of(sys.executable, "-c", "import time; time.sleep(60)") as made:
            waiting = asyncio.create_task(made.parse(GOOD[0]))
            while made.child_pid is None:  # noqa: ASYNC110 - bounded by `run`
                await asyncio.sleep(0.01)
            made.close()
            with pytest.raises((InternalBug, Overloaded)):
                await waiting

    run(story())
