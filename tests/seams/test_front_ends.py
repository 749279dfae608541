"""Both front ends, and the administration, over a router that is none: they know it by `router.api` alone."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest
from echo_router import EchoRouter
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.rpc.status import CANCEL_TOKEN_METADATA, REASON_METADATA, REQUEST_ID_METADATA
from pdserve.rpc.v1 import (
    admin_pb2_grpc,
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    vllm_engine_pb2,
    vllm_engine_pb2_grpc,
)
from router.grpc.admin import AdminServer
from router.grpc.front import GrpcFront
from router.http import serve_http
from router.parsing.parser import RequestParser

TIMEOUT_S = 60.0


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await story

    asyncio.run(bounded())


@asynccontextmanager
async def over_grpc(router: EchoRouter) -> AsyncIterator[grpc.aio.Channel]:
    parser = RequestParser(router.max_body_bytes)
    front = GrpcFront(router, parser, 16)
    await front.start("127.0.0.1", 0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{front.port}") as channel:
            yield channel
    finally:
        await front.close()
        parser.close()


@asynccontextmanager
async def over_http(router: EchoRouter) -> AsyncIterator[str]:
    parser = RequestParser(router.max_body_bytes)
    server = await serve_http(router, parser, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.close()
        parser.close()


async def fetch(url: str, body: object = None) -> bytes:
    """GET, or POST a body as JSON."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with await asyncio.to_thread(urllib.request.urlopen, request, timeout=TIMEOUT_S) as response:
        return bytes(response.read())


def test_grpc_answers_from_the_interface() -> None:
    async def story() -> None:
        router = EchoRouter()
        async with over_grpc(router) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(inference_pb2.GenerateRequest(text="hello"))
            answers = [answer async for answer in call]
            assert "".join(answer.text for answer in answers) == "hello"
            assert answers[-1].finish_reason == common_pb2.FINISH_REASON_STOP
            assert answers[-1].report.decode_worker == "decode-0"
            ids = await stub.Tokenize(inference_pb2.TokenizeRequest(text="ab"))
            assert list(ids.ids) == [97, 98]
            info = await stub.GetModelInfo(inference_pb2.GetModelInfoRequest())
            assert (info.model, info.architecture, info.max_model_len) == ("echo", "EchoForNobody", 101)
        assert all(echo.closed for echo in router.echoes.values())

    run(story())


def test_grpc_cancels_by_token_and_by_nothing_else() -> None:
    """(1) The end is held back; (2) a wrong token finds nothing; (3) the right one ends the call as cancelled."""

    async def story() -> None:
        router = EchoRouter()
        router.gate.clear()
        async with over_grpc(router) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            call = stub.Generate(inference_pb2.GenerateRequest(text="hello"))
            told = dict(await call.initial_metadata())
            request_id, token = told[REQUEST_ID_METADATA], told[CANCEL_TOKEN_METADATA]
            wrong = await stub.Cancel(inference_pb2.CancelRequest(request_id=request_id, cancel_token="0" * 81))
            assert not wrong.found
            right = await stub.Cancel(inference_pb2.CancelRequest(request_id=request_id, cancel_token=token))
            assert right.found
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                [answer async for answer in call]
            assert dict(caught.value.trailing_metadata())[REASON_METADATA] == "cancelled"

    run(story())


def test_gateways_are_answered_from_the_interface() -> None:
    """(1) A text comes back; (2) an answer that takes more memory than all may have is refused; (3) an abort ends a call whose
    end is held back, with what it has."""

    async def story() -> None:
        router = EchoRouter()
        router.max_inflight_answer_bytes = 1000
        async with over_grpc(router) as channel:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            (told,) = [one.complete async for one in stub.Generate(vllm_engine_pb2.GenerateRequest(text="hello"))]
            assert (list(told.output_ids), told.finish_reason) == (list(map(ord, "hello")), "stop")
            for stream in (False, True):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in stub.Generate(vllm_engine_pb2.GenerateRequest(text="x" * 9000, stream=stream)):
                        pass
                assert dict(caught.value.trailing_metadata())[REASON_METADATA] == "request_too_large"
                assert "router.max_inflight_answer_bytes" in (caught.value.details() or "")
            router.gate.clear()
            call = stub.Generate(vllm_engine_pb2.GenerateRequest(text="hello", request_id="one"))
            await call.initial_metadata()
            await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["one"]))
            (told,) = [one.complete async for one in call]
            assert (list(told.output_ids), told.finish_reason) == (list(map(ord, "hell")), "abort")
            (load,) = (await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())).loads
            assert (load.max_total_num_tokens, load.num_used_tokens, load.max_running_requests) == (160, 0, 1)
        assert all(echo.closed for echo in router.echoes.values())

    run(story())


def test_grpc_health_follows_the_interface() -> None:
    async def story() -> None:
        router = EchoRouter()
        async with over_grpc(router) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            said = aiter(watch)
            assert (await anext(said)).status == health_pb2.HealthCheckResponse.SERVING
            router.ready = False
            router.changed.set()
            assert (await anext(said)).status == health_pb2.HealthCheckResponse.NOT_SERVING

    run(story())


def test_http_answers_from_the_interface() -> None:
    async def story() -> None:
        async with over_http(EchoRouter()) as url:
            answer = json.loads(await fetch(f"{url}/v1/completions", {"model": "echo", "prompt": "hello"}))
            assert answer["choices"][0]["text"] == "hello"
            assert json.loads(await fetch(f"{url}/health")) == {"status": "ready"}
            assert await fetch(f"{url}/metrics") == b"echo_up 1\n"
            assert json.loads(await fetch(f"{url}/v1/models"))["data"][0]["id"] == "echo"

    run(story())


def test_the_administration_answers_from_the_interface() -> None:
    async def story() -> None:
        server = AdminServer(EchoRouter(), "token", 16)
        await server.start("127.0.0.1", 0)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                stub: Any = admin_pb2_grpc.AdminStub(channel)
                state = await stub.GetClusterState(inference_pb2.GetClusterStateRequest())
                assert ([w.hello.worker_id for w in state.workers], state.block_size) == (["decode-0"], 16)
                progress = [said async for said in stub.Drain(inference_pb2.DrainRequest(worker_id="decode-0"))]
                assert progress[-1].done
        finally:
            await server.close()

    run(story())
