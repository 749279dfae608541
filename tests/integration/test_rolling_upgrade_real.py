"""A rolling upgrade of real processes under load: old and new workers side by side, and then the new ones alone."""

from __future__ import annotations

import random
import time

import grpc
import pytest

from pdserve.config import MIB, EngineConfig, RouterConfig
from pdserve.core.worker import LINK_VERSIONS, VersionRange
from pdserve.rpc.v1 import admin_pb2_grpc, common_pb2, inference_pb2
from testkit.client import generate_all, request
from testkit.load import Load
from testkit.processes import ProcessCluster
from testkit.told_worker import of_versions

pytestmark = pytest.mark.cluster

BOUND_S = 60.0
ENGINE = EngineConfig(
    model="tiny",
    dtype="float32",
    batch_invariant=True,
    kv_cache_memory=4 * MIB,
    max_num_batched_tokens=16,
    threads=1,
    enable_prefix_caching=False,
)
OLD = of_versions(VersionRange(0, 0), VersionRange(0, 0))  # a release before versions
NEW = of_versions(LINK_VERSIONS, VersionRange(2, 3))
FOREIGN = of_versions(VersionRange(LINK_VERSIONS.newest + 1, LINK_VERSIONS.newest + 1), VersionRange(0, 1))
PAIRS = {("prefill-0", "decode-0"), ("prefill-1", "decode-1")}


def messages(count: int, seed: int) -> list[inference_pb2.GenerateRequest]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(40, 200))] for _ in range(count)]
    params = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
    return [request(prompt, common_pb2.PLACEMENT_DISAGGREGATED, **params) for prompt in prompts]


def drain(cluster: ProcessCluster, worker_id: str) -> None:
    """Drain a worker as an operator does. It has left when this returns."""
    with grpc.insecure_channel(cluster.admin) as channel:
        for _ in admin_pb2_grpc.AdminStub(channel).Drain(inference_pb2.DrainRequest(worker_id=worker_id), timeout=BOUND_S):
            pass
    assert cluster.processes[worker_id].popen.wait(BOUND_S) == 0, cluster.processes[worker_id].log()


@pytest.mark.slow
def test_a_rolling_upgrade_under_load_loses_and_changes_nothing() -> None:
    """(1) Old workers serve. (2) New ones, whose protocol the old ones do not speak, start beside them. (3) The old ones are
    drained one by one under load. (4) All requests end as undisturbed in their first attempt, and no old worker was ever paired
    with a new one. (5) A worker whose link the router cannot speak is refused, and says what to do."""
    asked = messages(24, seed=5)
    places = {"prefill-0": OLD, "decode-0": OLD, "prefill-1": NEW, "decode-1": NEW, "decode-2": FOREIGN}
    router = RouterConfig(max_attempts=1, retry_burst=0, retry_share=0.0)
    with ProcessCluster(ENGINE, router=router, worker={"heartbeat_interval_s": 0.1}, places=places) as cluster:
        expected = [answer.ids for answer in generate_all(cluster.grpc, asked)]
        cluster.prefill = cluster.decode = 2
        for name in ("prefill-1", "decode-1"):
            cluster.start_worker(name, wait=False)
        cluster.wait_whole()
        with Load(cluster.grpc, asked, concurrency=12) as load:
            load.until(lambda outcomes: sum(bool(o.answer.ids) for o in outcomes) >= 4)
            drain(cluster, "prefill-0")
            drain(cluster, "decode-0")
            outcomes = load.finish()
        later = generate_all(cluster.grpc, asked[:2])

        assert [(o.details, o.answer.ids) for o in outcomes] == [("", ids) for ids in expected]
        served = [(o.answer.report.prefill_worker, o.answer.report.decode_worker) for o in outcomes]
        assert PAIRS >= set(served) >= {("prefill-1", "decode-1")}  # the old ones may be drained before they get any
        assert {o.answer.report.attempts for o in outcomes} == {1}
        assert [answer.ids for answer in later] == expected[:2]

        refused = cluster.start_worker("decode-2")
        end_s = time.monotonic() + BOUND_S
        while "upgrade the older one of the two" not in refused.log():
            assert refused.alive
            assert time.monotonic() < end_s, refused.log()
            time.sleep(0.05)
        assert f"speaks version {LINK_VERSIONS.newest + 1} of the link's protocol, this router speaks" in refused.log()
        assert {w.hello.worker_id for w in cluster.state().workers} == {"prefill-1", "decode-1"}
