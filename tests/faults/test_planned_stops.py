"""Workers drain and the router is told to stop, all with default settings: no attempt is lost, and nobody waits for answers."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from collections.abc import Iterator

import grpc
import pytest
from fault_service import APART, BOUND_S

from pdserve.config import MIB, EngineConfig
from testkit.client import request
from testkit.load import Load, Outcome
from testkit.processes import ProcessCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def shared() -> Iterator[ProcessCluster]:
    # Small steps stand for a large model, which takes its time for a prompt. All else is as it is by default.
    engine = EngineConfig(model="tiny", dtype="float32", kv_cache_memory=32 * MIB, threads=1, max_num_batched_tokens=64)
    with ProcessCluster(engine, prefill=2, decode=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: ProcessCluster) -> ProcessCluster:
    shared.heal()
    return shared


def assert_undisturbed(ends: list[Outcome]) -> None:
    assert [(one.reason, one.details) for one in ends if not one.ok] == []
    assert {one.answer.report.attempts for one in ends} == {1}


def drain(cluster: ProcessCluster, name: str) -> None:
    """By SIGTERM. It ends with 0, which says that nothing was left on it."""
    process = cluster.processes[name]
    assert process.terminate(BOUND_S) == 0, process.log()
    assert "has not drained" not in process.log()


def test_a_drain_does_not_wait_for_answers(cluster: ProcessCluster) -> None:
    with Load(cluster.grpc, [request([3 + n] * 20, max_tokens=1200, **GREEDY) for n in range(16)]) as load:
        load.until(lambda outcomes: all(len(one.answer.ids) > 5 for one in outcomes), BOUND_S)
        drain(cluster, "decode-1")
        assert not all(one.done for one in load.outcomes)
        assert_undisturbed(load.finish())
    cluster.heal()
    cluster.assert_empty()


def test_a_drain_does_not_wait_for_prompts(cluster: ProcessCluster) -> None:
    asks = [request([3 + n % 200] * 1800, APART, max_tokens=4, **GREEDY) for n in range(64)]
    with Load(cluster.grpc, asks) as load:
        cluster.wait_state(lambda state: all(one.requests_placed for one in state.workers), BOUND_S)
        drain(cluster, "prefill-1")
        assert not all(one.answer.ids for one in load.outcomes)
        assert_undisturbed(load.finish())
    cluster.heal()
    cluster.assert_empty()


def test_a_router_that_is_told_to_stop_lets_streams_end(cluster: ProcessCluster) -> None:
    """(1) SIGTERM under streams. (2) It is not healthy and refuses new requests with a time to try again. (3) The streams end
    as ever, and it ends with 0. (4) The workers outlive it and serve the next router."""
    router = cluster.processes["router"]
    with Load(cluster.grpc, [request([3 + n] * 20, max_tokens=600, **GREEDY) for n in range(16)]) as load:
        load.until(lambda outcomes: all(len(one.answer.ids) > 5 for one in outcomes), BOUND_S)
        router.send(signal.SIGTERM)
        while (seen := status_of(cluster.http))[0] == 200:
            pass
        with Load(cluster.grpc, [request([9], max_tokens=2)]) as late:
            (refused,) = late.finish()
        assert not all(one.done for one in load.outcomes)
        assert_undisturbed(load.finish())
    assert seen[0] == 503
    assert (refused.status, refused.reason) == (grpc.StatusCode.UNAVAILABLE, "unavailable")
    assert "the router is stopping" in refused.details
    assert router.popen.wait(BOUND_S) == 0, router.log()
    cluster.start("router")
    cluster.heal()
    cluster.assert_empty()


def status_of(http: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{http}/health", timeout=BOUND_S) as answer:
            return answer.status, ""
    except urllib.error.HTTPError as exc:
        return exc.code, exc.reason
