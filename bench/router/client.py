"""The clients of `bench.router.cost`. A client sends one request on each of its streams at once, and checks every answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import Any, Final, Protocol

import grpc.aio

from bench.http_stream import HttpStream, post
from bench.router.floors import GENERATE
from bench.router.peer_config import WORD
from pdserve.rpc.v1 import common_pb2, inference_pb2

ANSWER_TIMEOUT_S: Final = 60.0
_PROMPT: Final = "the of and to in is that for it as was with"


class Client(Protocol):
    """One way to send requests to a server: gRPC or HTTP."""

    async def ask(self, tokens: int, interval_us: int) -> None:
        """Send one request on every stream at once, and read all answers to their ends. Each asks for `tokens` tokens with
        `interval_us` between them, where 0 means no pause. Raises `AssertionError` unless every token came.
        """


class GrpcClient:
    """All streams on one channel. Messages are parsed only after the last message has come, so that the server does not
    wait."""

    def __init__(self, channel: grpc.aio.Channel, streams: int) -> None:
        self._generate: Any = channel.unary_stream(GENERATE, request_serializer=inference_pb2.GenerateRequest.SerializeToString)
        self._streams = streams

    async def ask(self, tokens: int, interval_us: int) -> None:
        """See `Client.ask`."""
        sampling = common_pb2.SamplingParams(max_tokens=tokens, seed=interval_us, temperature=0.0)
        request = inference_pb2.GenerateRequest(text=_PROMPT, sampling=sampling)
        answers = await asyncio.gather(*(self._one(request) for _ in range(self._streams)))
        for answer in answers:
            parts = [inference_pb2.GenerateResponse.FromString(message) for message in answer]
            ids = [token_id for part in parts for token_id in part.ids]
            assert len(ids) == tokens, "the answer has not every token"
            ends = itertools.accumulate(len(part.ids) for part in parts)
            assert [part.index for part in parts] == [0, *ends][:-1], "the messages do not follow each other"
            assert parts[-1].finish_reason == common_pb2.FINISH_REASON_LENGTH

    async def _one(self, request: inference_pb2.GenerateRequest) -> list[bytes]:
        return [message async for message in self._generate(request, timeout=ANSWER_TIMEOUT_S)]


class HttpClient:
    """One connection for each stream."""

    def __init__(self, streams: list[HttpStream]) -> None:
        self._streams = streams

    @classmethod
    async def connect(cls, address: str, streams: int, stack: contextlib.AsyncExitStack) -> HttpClient:
        """Open `streams` connections to `address` (host:port). `stack` closes them."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        opened = []
        for _ in range(streams):
            _, stream = await loop.create_connection(HttpStream, host, int(port))
            stack.callback(stream.close)
            opened.append(stream)
        return cls(opened)

    async def ask(self, tokens: int, interval_us: int) -> None:
        """See `Client.ask`. Raises `ConnectionError` when the server closes a connection, and `TimeoutError` after 60 s."""
        request = _post(tokens, interval_us)
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            answers = await asyncio.gather(*(stream.ask(request) for stream in self._streams))
        for answer in answers:
            assert answer.startswith(b"HTTP/1.1 200"), answer[:1000]
            assert answer.count(WORD) == tokens, "the answer has not the text of every token"
            assert b"data: [DONE]\n\n" in answer[-100:]


def _post(tokens: int, interval_us: int) -> bytes:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": _PROMPT}],
        "stream": True,
        "max_tokens": tokens,
        "seed": interval_us,
        "temperature": 0,
    }
    return post("/v1/chat/completions", json.dumps(body).encode())
