"""A gRPC call that fails after it was queued says how far it came; one that was refused has nothing to tell."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import grpc
import pytest

from pdserve.rpc.status import REASON_METADATA, TIMELINE_METADATA
from pdserve.rpc.v1 import inference_pb2
from testkit.fake_worker import DECODE, PREFILL

from .local_cluster import generate_request, local_cluster, read_answer

TIMEOUT_S = 60.0


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await story

    asyncio.run(bounded())


async def failed(call: Any) -> dict[str, str]:
    """The trailing metadata of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return {key: str(value) for key, value in caught.value.trailing_metadata() or ()}


def test_a_deadline_that_passes_in_mid_stream_leaves_a_timeline() -> None:
    async def story() -> None:
        async with local_cluster((PREFILL, DECODE)) as cluster:
            cluster.decode.gate.clear()
            told = await failed(cluster.stub.Generate(generate_request((1, 2), 50, deadline_s=2.5)))
            assert told[REASON_METADATA] == "deadline_exceeded"
            timeline = json.loads(told[TIMELINE_METADATA])
            assert (timeline["prefill_worker"], timeline["decode_worker"]) == ("prefill-0", "decode-0")
            assert (timeline["attempts"], timeline["binds"], timeline["output_tokens"]) == (1, 1, 1)
            assert 0 < timeline["ttft_s"] <= timeline["total_s"]

    run(story())


def test_a_recovered_request_tells_its_attempts_and_the_metrics_tell_why() -> None:
    async def story() -> None:
        async with local_cluster((PREFILL, DECODE, DECODE)) as cluster:
            for worker in cluster.workers:
                worker.token_interval_s = 0.01
            call = cluster.stub.Generate(generate_request((1, 2), 60))
            said = aiter(call)
            for _ in range(5):
                await anext(said)
            serving = next(worker for worker in cluster.workers if worker.role == DECODE and worker.live_handles)
            await serving.stop()
            rest = [message async for message in said]
            assert rest[-1].usage.output_tokens == 60
            timeline = json.loads(dict(await call.trailing_metadata())[TIMELINE_METADATA])
            assert (timeline["attempts"], timeline["retry_reasons"]) == (2, ["replica_lost"])
            assert b'pdserve_retries_total{reason="replica_lost"} 1.0' in cluster.service.metrics()

    run(story())


def test_a_request_that_was_never_queued_has_no_timeline() -> None:
    async def story() -> None:
        async with local_cluster((DECODE,)) as cluster:
            told = await failed(cluster.stub.Generate(generate_request((1, 2), 50, model="another")))
            assert told[REASON_METADATA] == "unknown_model"
            assert TIMELINE_METADATA not in told

    run(story())


async def exactness(*numerics: str, **config: Any) -> tuple[bool, bool, bool]:
    """What the cluster's state, a request's report and its timeline say."""
    roles = (PREFILL, DECODE)
    async with local_cluster((), **config) as cluster:
        workers = [cluster.worker(role, numerics=name) for role, name in zip(roles, numerics, strict=True)]
        for worker in workers:
            await worker.start()
        state = await cluster.admin.GetClusterState(inference_pb2.GetClusterStateRequest())
        call = cluster.stub.Generate(generate_request((1, 2), 3))
        answer = await read_answer(call)
        timeline = json.loads(dict(await call.trailing_metadata())[TIMELINE_METADATA])
        for worker in workers:
            await worker.stop()
        return state.exact, answer.report.exact, timeline["exact"]


def test_status_and_timelines_say_whether_all_workers_compute_the_same_bits() -> None:
    async def story() -> None:
        assert await exactness("avx512", "avx512") == (True, True, True)
        assert await exactness("avx512", "avx2") == (False, False, False)
        assert await exactness("", "") == (False, False, False), "their tokens depend on their batches"

    run(story())


def test_a_request_is_exact_if_its_own_workers_compute_alike() -> None:
    """The third worker computes other bits, and has a part only in the request that comes when the second one has gone."""

    async def story() -> None:
        async with local_cluster(()) as cluster:
            workers = [cluster.worker(role, numerics=name) for role, name in ((PREFILL, "a"), (DECODE, "a"), (DECODE, "b"))]
            for worker in workers:
                await worker.start()
            answers = [await read_answer(cluster.stub.Generate(generate_request((1, i), 3))) for i in range(4)]
            state = await cluster.admin.GetClusterState(inference_pb2.GetClusterStateRequest())
            assert not state.exact
            await workers[1].stop()
            answers.append(await read_answer(cluster.stub.Generate(generate_request((1, 2), 3))))
            used = [(answer.report.decode_worker, answer.report.exact) for answer in answers]
            assert used == [("decode-0", True)] * 4 + [("decode-1", False)]

    run(story())


@pytest.mark.parametrize(("numerics", "said"), [("avx2", "other bits than prefill-0"), ("", "depend on their batch")])
def test_a_worker_whose_tokens_would_differ_is_refused_where_all_must_be_exact(numerics: str, said: str) -> None:
    async def story() -> None:
        async with local_cluster((PREFILL,), require_exact=True) as cluster:
            other = cluster.worker(DECODE, numerics=numerics)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await other.start()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert said in str(refused.value.details())
            assert "router.require_exact" in str(refused.value.details())

    run(story())


def test_a_worker_of_another_quantization_is_refused_unless_that_is_asked_for() -> None:
    async def story() -> None:
        async with local_cluster((PREFILL,)) as cluster:
            other = cluster.worker(DECODE, quantization="int4")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await other.start()
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            details = str(refused.value.details())
            assert all(word in details for word in ("int4", "none", "prefill-0", "router.allow_mixed_quantization"))

    run(story())
