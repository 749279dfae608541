"""Half of 500 clients leave at random moments: every block comes back, and so do memory, descriptors and threads."""

from __future__ import annotations

import asyncio
import random

import grpc
import pytest
from fault_service import AUTO, messages, oracle, tiny

from pdserve.rpc.v1 import inference_pb2, inference_pb2_grpc
from testkit.client import generate
from testkit.footprint import Footprint, footprint
from testkit.processes import ProcessCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CLIENTS = 500
AT_ONCE = 96
GROWTH_BYTES = 8 << 20  # allocators do not give everything back; a leak of the requests' KV alone would be 60 MiB
GROWTH_FDS = 4  # connections that come and go
GROWTH_THREADS = 2  # gRPC's pool


async def storm(address: str, asked: list[inference_pb2.GenerateRequest], seed: int) -> list[list[int] | None]:
    """All requests; every second one is left after a random while, if it has not ended. None: its client left."""
    rng = random.Random(seed)
    patience_s = [rng.uniform(0.0, 2.0) if i % 2 else 120.0 for i in range(len(asked))]
    gate = asyncio.Semaphore(AT_ONCE)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def one(i: int) -> list[int] | None:
            async with gate:
                try:
                    return (await asyncio.wait_for(generate(stub, asked[i]), patience_s[i])).ids
                except TimeoutError:
                    return None

        return await asyncio.gather(*(one(i) for i in range(len(asked))))


def footprints(cluster: ProcessCluster) -> dict[str, Footprint]:
    return {name: footprint(process.popen.pid) for name, process in cluster.processes.items()}


def assert_flat(before: dict[str, Footprint], after: dict[str, Footprint]) -> None:
    for name, was in before.items():
        now = after[name]
        assert now.rss_bytes - was.rss_bytes < GROWTH_BYTES, (name, was, now)
        assert now.fds - was.fds <= GROWTH_FDS, (name, was, now)
        assert now.threads - was.threads <= GROWTH_THREADS, (name, was, now)


@pytest.mark.timeout(600)
def test_storms_leave_no_block_and_no_memory_behind() -> None:
    """(1) A storm: those who stay get what they get alone. (2) All is free. (3) A second storm leaves nothing more."""
    asked = messages(CLIENTS, AUTO, prompt_tokens=120, max_tokens=48, seed=11)
    with ProcessCluster(tiny(max_num_batched_tokens=64), prefill=2, decode=2, worker={"heartbeat_interval_s": 0.1}) as cluster:
        expected = oracle(cluster, asked)
        seen = []
        for seed in (1, 2):
            got = asyncio.run(storm(cluster.grpc, asked, seed))
            assert 50 < sum(ids is None for ids in got) <= CLIENTS // 2
            assert all(ids in (None, right) for ids, right in zip(got, expected, strict=True))
            cluster.assert_empty()
            seen.append(footprints(cluster))
        assert_flat(*seen)
        assert all(process.alive for process in cluster.processes.values())
