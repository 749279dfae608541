"""Aborts of vLLM's interface that come before the router knows all of the request."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from pdserve.rpc.v1 import vllm_engine_pb2, vllm_engine_pb2_grpc

from .local_cluster import local_cluster

BOUND_S = 60.0


@pytest.mark.parametrize("choices", [1, 3])
def test_an_abort_reaches_a_large_request_that_is_still_being_read(choices: int) -> None:
    """(1) The parser is busy, so a request waits for it. (2) An Abort of its id comes. It was said to be of no request, and the
    request ran to its end. (3) The request is read, and its answer ends."""
    busy = threading.Event()
    params = vllm_engine_pb2.SamplingParams(max_tokens=200, n=choices)
    large = vllm_engine_pb2.TokenizedInput(original_text="x" * 50_000, input_ids=[5, 6, 7])
    message = vllm_engine_pb2.GenerateRequest(request_id="mine", tokenized=large, sampling_params=params)

    async def story() -> None:
        async with asyncio.timeout(BOUND_S), local_cluster() as cluster:
            stub: Any = vllm_engine_pb2_grpc.VllmEngineStub(cluster.channel)
            parsing = cluster.parser._thread
            holding = asyncio.create_task(parsing.run(lambda: busy.wait(BOUND_S), ("somebody",), 1))
            call = stub.Generate(message)
            while not len(parsing._turns):  # noqa: ASYNC110 - no event tells it
                await asyncio.sleep(0)
            await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["mine"]))
            busy.set()
            ends = [one.complete async for one in call if one.HasField("complete")]
            assert sorted((one.index, one.finish_reason) for one in ends) == [(i, "abort") for i in range(choices)]
            assert await holding
            await cluster.assert_idle()

    try:
        asyncio.run(story())
    finally:
        busy.set()
