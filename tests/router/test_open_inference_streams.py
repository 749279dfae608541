"""Streams of the Open Inference Protocol that go wrong: the fault costs one request, or the stream ends and says why."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pdserve.core.errors import Cancelled, PdserveError
from pdserve.rpc import status
from pdserve.rpc.status import REASON_METADATA
from pdserve.rpc.v1 import open_inference_pb2 as pb
from pdserve.rpc.v1 import open_inference_pb2_grpc
from router.grpc import open_inference

from .local_cluster import local_cluster

METHOD = f"/{open_inference.OPEN_INFERENCE}/ModelStreamInfer"


def infer_request(model: str, name: str) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, id=name)
    message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hello")
    message.parameters["max_tokens"].int64_param = 3
    return message


def test_bytes_that_are_no_message_cost_one_request() -> None:
    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            model = cluster.service.model_name
            good = infer_request(model, "good").SerializeToString()
            answers = [pb.ModelStreamInferResponse.FromString(one) for one in await sent(cluster, b"\xff", good)]
            (bad,) = [one for one in answers if one.error_message]
            (answer,) = [one for one in answers if not one.error_message]
            assert "request: is not a message" in bad.error_message
            assert answer.infer_response.id == "good"
            assert all(one.infer_response.parameters["triton_final_response"].bool_param for one in answers)
            await cluster.assert_idle()

    asyncio.run(story())


@pytest.mark.parametrize("prompt", [b"hello", b"hello" * 10_000], ids=["small", "large"])
def test_a_refused_request_is_told_by_its_id(prompt: bytes) -> None:
    """A large one is read elsewhere, and its error came without the id."""

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            bad = infer_request(cluster.service.model_name, "mine")
            bad.inputs[0].contents.bytes_contents[0] = prompt
            bad.parameters["nothing"].int64_param = 1
            (answer,) = map(pb.ModelStreamInferResponse.FromString, await sent(cluster, bad.SerializeToString()))
            assert answer.error_message.startswith("nothing: ")
            assert answer.infer_response.id == "mine"
            await cluster.assert_idle()

    asyncio.run(story())


async def sent(cluster: Any, *messages: bytes) -> list[bytes]:
    """The answers to a stream of these messages."""
    call = cluster.channel.stream_stream(METHOD)(iterated(messages))
    return [answer async for answer in call]


async def iterated(messages: tuple[Any, ...]) -> AsyncIterator[Any]:
    for message in messages:
        yield message


def test_requests_beyond_the_bound_of_a_stream_wait_for_earlier_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_inference, "MAX_STREAM_REQUESTS", 2)

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            model = cluster.service.model_name
            messages = [infer_request(model, str(i)).SerializeToString() for i in range(7)]
            answers = [pb.ModelStreamInferResponse.FromString(one) for one in await sent(cluster, *messages)]
            assert sorted(one.infer_response.id for one in answers) == [str(i) for i in range(7)]
            assert not any(one.error_message for one in answers)
            await cluster.assert_idle()

    asyncio.run(story())


def test_a_stream_on_which_nothing_runs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_inference, "IDLE_S", 0.2)

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            stub: Any = open_inference_pb2_grpc.GRPCInferenceServiceStub(cluster.channel)
            call = stub.ModelStreamInfer()
            await call.write(infer_request(cluster.service.model_name, "first"))
            assert (await call.read()).infer_response.id == "first"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert dict(caught.value.trailing_metadata() or ())[REASON_METADATA] == "request_timeout"
            await cluster.assert_idle()

    asyncio.run(story())


def test_a_client_that_reads_nothing_loses_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers are errors, so no generation of it could be found to stall. It does not read how its stream ended, either."""
    monkeypatch.setattr(open_inference, "WRITE_TIMEOUT_S", 0.3)
    aborted: list[PdserveError] = []
    ended = asyncio.Event()
    abort = status.abort

    async def seen(context: Any, error: PdserveError, *more: tuple[str, str]) -> None:
        aborted.append(error)
        ended.set()
        await abort(context, error, *more)

    monkeypatch.setattr(status, "abort", seen)

    async def story() -> None:
        async with asyncio.timeout(60), local_cluster() as cluster:
            bad = infer_request(cluster.service.model_name, "bad")
            bad.parameters["nothing"].int64_param = 1
            stub: Any = open_inference_pb2_grpc.GRPCInferenceServiceStub(cluster.channel)

            async def without_end() -> AsyncIterator[Any]:  # nobody knows how much the connection takes before it is full
                while not ended.is_set():
                    yield bad

            call = stub.ModelStreamInfer(without_end())
            async with asyncio.timeout(30):
                await ended.wait()
            assert [type(error) for error in aborted] == [Cancelled]
            call.cancel()
            await cluster.assert_idle()

    asyncio.run(story())
