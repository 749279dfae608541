"""The gRPC target against a scripted router. Every failure is a reason and no exception."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve.rpc.status import REASON_METADATA, TIMELINE_METADATA
from pdserve.rpc.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from pdserve_bench.load import target as reasons
from pdserve_bench.load.grpc_target import GrpcTarget
from pdserve_bench.load.target import LoadAnswer, LoadCall, RequestOptions

Response = inference_pb2.GenerateResponse
CALL = LoadCall(0, (1, 2, 3), 4, "chat", "s")
LAST = Response(
    ids=[9],
    text="c",
    finish_reason=common_pb2.FINISH_REASON_LENGTH,
    usage=inference_pb2.Usage(prompt_tokens=3, output_tokens=4),
    report=inference_pb2.RequestReport(request_id="r", placement=common_pb2.PLACEMENT_COLOCATED, kv_bytes=5),
)


class Scripted(inference_pb2_grpc.InferenceServicer):
    def __init__(self, answer: Callable[[], Iterable[Any]]) -> None:
        self._answer = answer
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.cancelled = asyncio.Event()

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> AsyncIterator[Response]:
        self.requests.append(request)
        for part in self._answer():
            if part is None:
                try:
                    await asyncio.sleep(60)
                finally:
                    self.cancelled.set()
            elif isinstance(part, Response):
                yield part
            else:
                await context.abort(*part)


@asynccontextmanager
async def scripted_router(answer: Callable[[], Iterable[Any]]) -> AsyncIterator[tuple[Scripted, GrpcTarget]]:
    server = grpc.aio.server()
    servicer = Scripted(answer)
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    target = GrpcTarget(f"127.0.0.1:{port}", RequestOptions(model="m"), channels=2)
    try:
        yield servicer, target
    finally:
        await target.close()
        await server.stop(None)


async def send(target: GrpcTarget, call: LoadCall = CALL) -> LoadAnswer:
    answer = LoadAnswer()
    async with asyncio.timeout(60):
        await target.send(call, answer)
    return answer


def test_answers_are_read() -> None:
    async def run() -> None:
        parts = [Response(ids=[7, 8], text="a"), Response(text="b"), Response(ids=[5]), LAST]
        async with scripted_router(lambda: parts) as (servicer, target):
            other = target.with_options(RequestOptions(cache_salt="salt", placement="disaggregated"))
            answer, text = await asyncio.gather(send(target), send(other, LoadCall(1, "hello", 4)))
        assert (answer.error, answer.ids, "".join(answer.texts)) == ("", [7, 8, 5, 9], "abc")
        assert [count for _, count in answer.arrivals] == [2, 1, 1]
        assert (answer.prompt_tokens, answer.output_tokens) == (3, 4)
        assert (answer.served.placement, answer.served.kv_bytes, answer.served.request_id) == ("colocated", 5, "r")
        assert text.error == ""
        sent = {request.text: request for request in servicer.requests}
        assert (list(sent[""].tokens.ids), sent[""].slo_class, sent[""].session_id) == ([1, 2, 3], "chat", "s")
        assert sent["hello"].sampling.ignore_eos
        assert (sent[""].cache_salt, sent["hello"].cache_salt) == ("", "salt")
        assert sent["hello"].placement == common_pb2.PLACEMENT_DISAGGREGATED

    asyncio.run(run())


UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
HOSTILE: dict[str, tuple[list[Any], str]] = {
    "named": ([(UNAVAILABLE, "x", ((REASON_METADATA, "replica_lost"), (TIMELINE_METADATA, '{"attempts":2}')))], "replica_lost"),
    "unnamed": ([(UNAVAILABLE, "x", ((TIMELINE_METADATA, "garbage"),))], "grpc_unavailable"),
    "ends too early": ([Response(ids=[1])], reasons.BROKEN_STREAM),
    "too many tokens": ([Response(ids=[1] * 5), LAST], reasons.TOO_MANY_TOKENS),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_router_is_a_reason(case: str) -> None:
    parts, reason = HOSTILE[case]

    async def run() -> LoadAnswer:
        async with scripted_router(lambda: parts) as (_, target):
            return await send(target)

    answer = asyncio.run(run())
    assert answer.error == reason
    assert answer.served.attempts == (2 if case == "named" else None)


def test_cancelled_call_is_cancelled_on_the_server() -> None:
    async def run() -> None:
        async with scripted_router(lambda: [Response(ids=[1]), None]) as (servicer, target):
            answer = LoadAnswer()
            task = asyncio.create_task(target.send(CALL, answer))
            while not answer.arrivals:  # noqa: ASYNC110 - the test times out
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(60):
                await servicer.cancelled.wait()

    asyncio.run(run())


def test_nobody_listens_and_text_that_is_no_utf8() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    async def run() -> list[str]:
        target = GrpcTarget(f"127.0.0.1:{port}", RequestOptions(), channels=1)
        try:
            return [(await send(target)).error, (await send(target, LoadCall(0, "\ud800", 1))).error]
        finally:
            await target.close()

    assert asyncio.run(run()) == [reasons.CONNECTION_REFUSED, reasons.BAD_UTF8]
