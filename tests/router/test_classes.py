"""Classes over gRPC: a request of a class is reported, counted and shown, and a full queue sheds the lowest class."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import grpc
import pytest

from pdserve.rpc.status import REASON_METADATA, RETRY_AFTER_METADATA, TIMELINE_METADATA
from pdserve.rpc.v1 import inference_pb2
from testkit.fake_worker import DECODE

from .local_cluster import TOKEN, LocalCluster, generate_request, local_cluster, read_answer

CLASSES = {
    "slow": {"ttft_s": 60, "tpot_s": 60},
    "fast": {"ttft_s": 1e-9, "tpot_s": 1e-9},
    "urgent": {"priority": 9, "queue_share": 0.5},
}


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60.0):
            await story

    asyncio.run(bounded())


def counted(cluster: LocalCluster, name: str) -> set[str]:
    """Return the samples of a metric without its name."""
    lines = cluster.service.metrics().decode().splitlines()
    return {line.removeprefix(name) for line in lines if line.startswith(name)}


async def classes_of(cluster: LocalCluster) -> dict[str, inference_pb2.ClassState]:
    metadata = (("pdserve-cluster-token", TOKEN),)
    state = await cluster.admin.GetClusterState(inference_pb2.GetClusterStateRequest(), metadata=metadata)
    return {one.slo_class: one for one in state.classes}


def test_targets_are_reported_counted_and_shown_and_probes_count_nowhere() -> None:
    async def story() -> None:
        async with local_cluster(probe_workers=True, slo_classes=CLASSES, default_class="slow") as cluster:
            while not cluster.service.ready:
                await cluster.service.next_ready(False)
            slow = (await cluster.generate((1, 2), 3)).report
            fast = (await cluster.generate((1, 2), 3, slo_class="fast")).report
            free = (await cluster.generate((1, 2), 3, slo_class="default")).report
            assert (slow.slo_class, slow.ttft_met, slow.tpot_met) == ("slow", True, True)
            assert (fast.slo_class, fast.ttft_met, fast.tpot_met) == ("fast", False, False)
            assert (free.slo_class, free.HasField("ttft_met"), free.HasField("tpot_met")) == ("default", False, False)
            with pytest.raises(grpc.aio.AioRpcError, match="top_p"):
                await read_answer(cluster.stub.Generate(_with_wrong_field()))
            assert counted(cluster, "pdserve_slo_requests_total") == {
                '{slo_class="slow",tpot="met",ttft="met"} 1.0',
                '{slo_class="fast",tpot="missed",ttft="missed"} 1.0',
                '{slo_class="default",tpot="none",ttft="none"} 1.0',
            }
            assert counted(cluster, "pdserve_slo_good_requests_total") == {
                '{slo_class="slow"} 1.0',
                '{slo_class="default"} 1.0',
            }
            assert counted(cluster, "pdserve_slo_refused_requests_total") == {'{reason="invalid_request",slo_class="fast"} 1.0'}
            shown = await classes_of(cluster)
            assert {name: (one.requests, one.good, one.refused) for name, one in shown.items()} == {
                "default": (1, 1, 0),
                "fast": (1, 0, 1),
                "slow": (1, 1, 0),
            }
            assert shown["fast"].window_s == 300
            await cluster.assert_idle()

    run(story())


def _with_wrong_field() -> inference_pb2.GenerateRequest:
    request = generate_request((1, 2), 3, slo_class="fast")
    request.sampling.top_p = -1.0
    return request


def test_a_shed_request_is_told_when_to_try_again_and_counted_by_class() -> None:
    async def story() -> None:
        settings = {"max_queued_requests": 2, "slo_classes": CLASSES}
        async with local_cluster((DECODE,), worker=lambda: {"max_num_seqs": 1}, **settings) as cluster:
            cluster.decode.gate.clear()
            calls = []
            for name in ("slow", "slow", "slow", "urgent"):
                calls.append(cluster.stub.Generate(generate_request((1, 2), 3, slo_class=name)))
                assert "pdserve-request-id" in dict(await calls[-1].initial_metadata())
            with pytest.raises(grpc.aio.AioRpcError, match="class 'urgent' came") as shed:
                await read_answer(calls.pop(2))
            told = dict(shed.value.trailing_metadata() or ())
            assert shed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (told[REASON_METADATA], float(told[RETRY_AFTER_METADATA]) > 0) == ("overloaded", True)
            timeline = json.loads(told[TIMELINE_METADATA])
            assert (timeline["slo_class"], timeline["ttft_met"], timeline["tpot_met"]) == ("slow", False, False)
            with pytest.raises(grpc.aio.AioRpcError, match="at most 1 requests"):
                await cluster.generate((1, 2), 3, slo_class="urgent")
            with pytest.raises(grpc.aio.AioRpcError, match="at most 2 requests"):
                await cluster.generate((1, 2), 3, slo_class="slow")
            cluster.decode.gate.set()
            for call in calls:
                await read_answer(call)
            assert counted(cluster, "pdserve_slo_refused_requests_total") == {
                '{reason="shed",slo_class="slow"} 1.0',
                '{reason="class_share",slo_class="urgent"} 1.0',
                '{reason="overloaded",slo_class="slow"} 1.0',
            }
            assert {name: (one.shed, one.refused) for name, one in (await classes_of(cluster)).items()} == {
                "slow": (1, 1),
                "urgent": (0, 1),
            }
            await cluster.assert_idle()

    run(story())
