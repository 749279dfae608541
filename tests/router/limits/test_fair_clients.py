"""Over gRPC: neither a burst of calls, nor one call of many choices, nor a batch delays the light request of another connection
by more than about one request."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from testkit.fake_worker import DECODE
from tests.router.local_cluster import LocalCluster, generate_request, local_cluster

BURST = 24
FEW = 4  # the request that has the slot, the next one, and what the other connection's answers overtake on their way here


def burst(kind: str) -> list[inference_pb2.GenerateRequest | inference_pb2.GenerateBatchRequest]:
    if kind == "calls":
        return [generate_request((i, 1, 2), 3) for i in range(BURST)]
    if kind == "choices":
        return [generate_request((1, 2), 3, n=BURST)]
    return [inference_pb2.GenerateBatchRequest(requests=[generate_request((i, 1, 2), 3) for i in range(BURST)])]


async def read(stub: Any, request: Any, ended: list[str], name: str) -> None:
    """Read an answer, and note each of its requests that ends."""
    if isinstance(request, inference_pb2.GenerateBatchRequest):
        answers = (one.response async for one in stub.GenerateBatch(request))
    else:
        answers = stub.Generate(request)
    async for one in answers:
        if one.finish_reason:
            ended.append(name)  # noqa: PERF401 - it is noted as it comes


async def waiting(cluster: LocalCluster, count: int) -> None:
    async with asyncio.timeout(30.0):
        while cluster.service.snapshot().queued_requests < count:  # noqa: ASYNC110 - nothing tells that a queue has grown
            await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["calls", "choices", "batch"])
@pytest.mark.parametrize("key", ["address", "connection", "header:x-tenant"])
def test_a_light_request_of_another_client_goes_before_a_burst(kind: str, key: str) -> None:
    async def story() -> None:
        async with local_cluster((DECODE,), worker=lambda: {"max_num_seqs": 1}, fairness_key=key) as cluster:
            cluster.decode.gate.clear()
            ended: list[str] = []
            tasks = [asyncio.create_task(read(cluster.stub, request, ended, "burst")) for request in burst(kind)]
            await waiting(cluster, BURST - 1)
            own = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
            async with grpc.aio.insecure_channel(cluster.grpc_address, options=own) as channel:
                light = read(inference_pb2_grpc.InferenceStub(channel), generate_request((9, 9), 2), ended, "light")
                tasks.append(asyncio.create_task(light))
                await waiting(cluster, BURST)
                cluster.decode.gate.set()
                await asyncio.gather(*tasks)
            assert len(ended) == BURST + 1
            assert ended.index("light") <= FEW
            await cluster.assert_idle()

    asyncio.run(asyncio.wait_for(story(), 60.0))
