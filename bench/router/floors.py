"""Bare servers on the libraries of the router's two front ends. They only answer, so a front end cannot cost less.

The gRPC server writes messages that are serialised beforehand, with the number and the length of the router's messages. The
HTTP server is an ASGI application without routes or a framework, which writes the same SSE bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import uvicorn

from bench.router.peer_config import PeerConfig, Ticks, text_of
from pdserve.core.sampling import FinishReason
from pdserve.rpc.v1 import common_pb2, inference_pb2
from router.http.protocol import KEEP_ALIVE_S
from router.openai.chunks import DONE, ChunkFormat, Envelope
from router.openai.request import Call

REQUEST_ID = "0123456789abcdef" * 2  # as long as the router's own
GENERATE = "/pdserve.rpc.v1.Inference/Generate"


def messages(count: int) -> list[bytes]:
    """Return an answer of `count` tokens as serialised gRPC messages."""
    return [
        inference_pb2.GenerateResponse(
            request_id=REQUEST_ID,
            index=index,
            ids=[index % 500],
            text=text_of(index),
            finish_reason=common_pb2.FINISH_REASON_LENGTH if index + 1 == count else common_pb2.FINISH_REASON_UNSPECIFIED,
        ).SerializeToString()
        for index in range(count)
    ]


def events(count: int) -> list[bytes]:
    """Return an answer of `count` tokens as SSE events. The first event also carries the role."""
    call = Call(chat=True, request_id=REQUEST_ID, inputs=(), stream=True, include_usage=False, continuous_usage=False)
    format_ = ChunkFormat(Envelope(call, "tiny"), call, 0)
    made = [format_.chunk(text_of(index), FinishReason.LENGTH if index + 1 == count else None) for index in range(count)]
    made[0] = format_.role + made[0]
    return made


@contextlib.asynccontextmanager
async def serve_grpc(config: PeerConfig) -> AsyncIterator[dict[str, Any]]:
    """Run the bare gRPC server, and yield its address."""
    ticks = Ticks()
    prepared: dict[int, list[bytes]] = {}

    async def generate(request: inference_pb2.GenerateRequest, context: Any) -> None:
        sampling = request.sampling
        answer = prepared.get(sampling.max_tokens) or prepared.setdefault(sampling.max_tokens, messages(sampling.max_tokens))
        for message in answer:
            if sampling.seed:
                await ticks.wait(sampling.seed)
            await context.write(message)

    handler = grpc.unary_stream_rpc_method_handler(
        generate, request_deserializer=inference_pb2.GenerateRequest.FromString, response_serializer=None
    )
    service, method = GENERATE[1:].split("/")
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {method: handler})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield {"grpc": f"127.0.0.1:{port}"}
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def serve_http(config: PeerConfig) -> AsyncIterator[dict[str, Any]]:
    """Run the bare HTTP server, and yield its address."""
    ticks = Ticks()
    prepared: dict[int, list[bytes]] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = json.loads((await receive())["body"])
        count, interval_us = request["max_tokens"], request["seed"]
        answer = prepared.get(count) or prepared.setdefault(count, events(count))
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-request-id", REQUEST_ID.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for event in answer:
            if interval_us:
                await ticks.wait(interval_us)
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    settings = uvicorn.Config(
        app,
        http="httptools",
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    server = uvicorn.Server(settings)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield {"http": f"127.0.0.1:{listener.getsockname()[1]}"}
    finally:
        server.should_exit = True
        await task
