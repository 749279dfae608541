"""The clients of `bench.router.cost`. A client sends one request on each of its streams at once, and checks every answer."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import Any, Final, Protocol, cast

import grpc.aio

from bench.router.floors import GENERATE
from bench.router.peer_config import WORD
from pdserve.rpc.v1 import common_pb2, inference_pb2

ANSWER_TIMEOUT_S: Final = 60.0
_BODY_END: Final = b"\r\n0\r\n\r\n"
_PROMPT: Final = "the of and to in is that for it as was with"


class Client(Protocol):
    """One way to ask a server: gRPC or HTTP."""

    async def ask(self, tokens: int, interval_us: int) -> None:
        """Send one request on every stream at once, and read all answers to their ends. Each asks for `tokens` tokens with
        `interval_us` between them, where 0 means no pause. Raises `AssertionError` unless every token came.
        """


class GrpcClient:
    """All streams on one channel. Messages are parsed only after the last one has come, so that the server does not wait."""

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


class _HttpStream(asyncio.Protocol):
    """One kept-alive connection, with at most one request under way."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._whole: asyncio.Future[bytes] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not inherit from asyncio's

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.endswith(_BODY_END) and self._whole is not None:
            self._whole.set_result(bytes(self._received))
            self._received.clear()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._whole is not None and not self._whole.done():
            self._whole.set_exception(ConnectionError(f"closed after {bytes(self._received)!r}"))

    async def ask(self, request: bytes) -> bytes:
        assert self._transport is not None
        self._whole = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._whole

    def close(self) -> None:
        assert self._transport is not None
        self._transport.abort()


class HttpClient:
    """One connection for each stream."""

    def __init__(self, streams: list[_HttpStream]) -> None:
        self._streams = streams

    @classmethod
    async def connect(cls, address: str, streams: int, stack: contextlib.AsyncExitStack) -> HttpClient:
        """Open `streams` connections to `address` (host:port). `stack` closes them."""
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()
        opened = []
        for _ in range(streams):
            _, stream = await loop.create_connection(_HttpStream, host, int(port))
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
    encoded = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1",
        "Host: bench",
        "Content-Type: application/json",
        f"Content-Length: {len(encoded)}",
        "\r\n",
    )
    return "\r\n".join(head).encode() + encoded
