"""What gRPC clients write wrongly: a status, a reason for programs, a message that names field and limit.

One stream is open all the while, and its tokens come as if nothing had happened.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from pdserve.rpc.v1 import inference_pb2
from pdserve.testing.fake_worker import token_at

from .router_under_test import PROMPT, UnderTest, failure, generate, reason, running

INVALID = (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request")
LATE = (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded")
UNKNOWN = (grpc.StatusCode.NOT_FOUND, "unknown_model")
NAN, INF = float("nan"), float("inf")


def tokens(*ids: int) -> inference_pb2.TokenPrompt:
    return inference_pb2.TokenPrompt(ids=ids)


def sampled(**sampling: Any) -> inference_pb2.GenerateRequest:
    return generate(sampling={"max_tokens": 4, **sampling})


def bare(**fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(**fields)


TABLE: list[tuple[str, inference_pb2.GenerateRequest, tuple[grpc.StatusCode, str], list[str]]] = [
    ("long prompt", generate(tokens=tokens(*[5] * 2048)), INVALID, ["prompt", "2048", "2047"]),
    ("long text", generate(text="x " * 5000), INVALID, ["prompt", "2047"]),
    ("unknown model", generate(model="gpt-9"), UNKNOWN, ["model", "gpt-9", "tiny"]),
    ("huge model name", generate(model="ü" * 1_000_000), UNKNOWN, ["model", "tiny"]),
    ("id past vocabulary", generate(tokens=tokens(1, 512)), INVALID, ["prompt", "512", "511"]),
    ("huge id", generate(tokens=tokens(2**32 - 1)), INVALID, ["prompt", "511"]),
    ("empty text", bare(text=""), INVALID, ["prompt", "empty"]),
    ("no ids", bare(tokens=tokens()), INVALID, ["prompt", "empty"]),
    ("no messages", bare(chat=inference_pb2.ChatPrompt()), INVALID, ["prompt", "empty"]),
    ("no prompt", bare(), INVALID, ["prompt", "text, tokens or chat"]),
    ("max_tokens 0", sampled(max_tokens=0), INVALID, ["max_tokens", "from 1"]),
    ("max_tokens 2^31", sampled(max_tokens=2**31), INVALID, ["max_tokens", "2048", "2028"]),
    ("max_tokens 2^32-1", sampled(max_tokens=2**32 - 1), INVALID, ["max_tokens", str(2**31)]),
    ("temperature NaN", sampled(temperature=NAN), INVALID, ["temperature", "[0.0, 2.0]"]),
    ("temperature inf", sampled(temperature=INF), INVALID, ["temperature", "[0.0, 2.0]"]),
    ("temperature -1", sampled(temperature=-1), INVALID, ["temperature", "[0.0, 2.0]"]),
    ("top_p 0", sampled(top_p=0), INVALID, ["top_p", "(0.0, 1.0]"]),
    ("top_p NaN", sampled(top_p=NAN), INVALID, ["top_p", "(0.0, 1.0]"]),
    ("min_p 2", sampled(min_p=2), INVALID, ["min_p", "[0.0, 1.0]"]),
    ("top_k 2^32-1", sampled(top_k=2**32 - 1), INVALID, ["top_k", str(2**31)]),
    ("min_tokens", sampled(min_tokens=5), INVALID, ["min_tokens", "to 4"]),
    ("many stops", sampled(stop=["x"] * 17), INVALID, ["stop", "17", "16"]),
    ("empty stop", sampled(stop=[""]), INVALID, ["stop", "1 to 1024"]),
    ("long stop", sampled(stop=["x" * 1025]), INVALID, ["stop", "1 to 1024"]),
    ("many stop ids", sampled(stop_token_ids=[1] * 257), INVALID, ["stop_token_ids", "257", "256"]),
    ("stop id past vocabulary", sampled(stop_token_ids=[512]), INVALID, ["stop_token_ids", "511"]),
    ("placement 77", generate(placement=77), INVALID, ["placement", "77"]),
    ("priority 101", generate(priority=101), INVALID, ["priority", "-100 to 100"]),
    ("priority -101", generate(priority=-101), INVALID, ["priority", "-100 to 100"]),
    ("long request_id", generate(request_id="x" * 129), INVALID, ["request_id", "128"]),
    ("long request_id in bytes", generate(request_id="ü" * 65), INVALID, ["request_id", "128"]),
    ("two lines of request_id", generate(request_id="a\nb"), INVALID, ["request_id", "printable"]),
    ("deadline 0", generate(deadline_s=0), LATE, ["deadline_s"]),
    ("deadline -1", generate(deadline_s=-1), LATE, ["deadline_s"]),
    ("deadline -inf", generate(deadline_s=-INF), LATE, ["deadline_s"]),
    ("deadline NaN", generate(deadline_s=NAN), INVALID, ["deadline_s", "3600"]),
    ("deadline inf", generate(deadline_s=INF), INVALID, ["deadline_s", "3600"]),
    ("deadline over the limit", generate(deadline_s=3601), INVALID, ["deadline_s", "3600"]),
]


def test_table_while_another_stream_is_open() -> None:
    """(1) Open a stream and stop its decode worker after some tokens. (2) Be wrong in every way. (3) Read it to its end."""

    async def run() -> None:
        async with running() as router:
            stream = router.stub.Generate(generate(request_id="untouched", sampling={"max_tokens": 50}))
            router.decode.token_interval_s = 0.01
            parts = aiter(stream)
            ids = list((await anext(parts)).ids)
            router.decode.gate.clear()
            for name, request, expected, words in TABLE:
                await _refused(router, name, request, expected, words)
            await _refused(router, "duplicate", generate(request_id="untouched"), INVALID, ["request_id", "untouched"])
            router.decode.gate.set()
            router.decode.token_interval_s = 0
            async for part in parts:
                ids.extend(part.ids)
            assert ids == [token_at(PROMPT, i) for i in range(50)]

    asyncio.run(run())


async def _refused(
    router: UnderTest,
    name: str,
    request: inference_pb2.GenerateRequest,
    expected: tuple[grpc.StatusCode, str],
    words: list[str],
) -> None:
    error = await failure(router.stub.Generate(request, timeout=5))
    assert (error.code(), reason(error)) == expected, (name, error)
    details = error.details() or ""
    assert all(word in details for word in words), (name, details)
    assert len(details) <= 500, name


def test_oversized_message() -> None:
    async def run() -> None:
        async with running(max_body_bytes=100_000) as router:
            error = await failure(router.stub.Generate(generate(text="x" * 100_001)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "100000" in (error.details() or "")
            async for _ in router.stub.Generate(generate()):
                pass

    asyncio.run(run())


def test_calls_own_deadline_ends_the_request() -> None:
    async def run() -> None:
        async with running() as router:
            router.decode.gate.clear()
            for timeout_s in (0.0, 0.001, 0.3):
                error = await failure(router.stub.Generate(generate(), timeout=timeout_s))
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            await router.assert_empty()
            router.decode.gate.set()

    asyncio.run(run())
