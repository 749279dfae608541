"""Real workers with broken weights, and prompts that are no numbers anywhere. All settings of router and workers are the
defaults."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_service import AUTO, assert_all_equal, messages, oracle, prompt

from pdserve.config import MIB, EngineConfig
from pdserve.rpc.v1 import inference_pb2
from testkit.client import request
from testkit.load import Load, Outcome
from testkit.processes import ProcessCluster
from testkit.told_worker import Breakage

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

VICTIM = "decode-2"
BACK_S = 180.0  # it is out for 30 s, then probed, and gets one of 17 requests at first
ENGINE = EngineConfig(model="tiny", dtype="float32", batch_invariant=True, kv_cache_memory=16 * MIB, threads=1)
ASKED = messages(24, AUTO, prompt_tokens=60, max_tokens=24)


class Cluster:
    """Two prefill and four decode workers. `victim` breaks one of these, `everywhere` all others."""

    def __init__(self, cluster: ProcessCluster, victim: Breakage, everywhere: Breakage) -> None:
        self.processes, self.victim, self.everywhere = cluster, victim, everywhere
        self.expected = oracle(cluster, ASKED)

    def serve(self) -> list[Outcome]:
        """Send the requests, and check that all are answered as undisturbed."""
        with Load(self.processes.grpc, ASKED) as load:
            outcomes = load.finish()
        assert_all_equal(outcomes, self.expected)
        return outcomes

    def metric(self, sample: str) -> float:
        with urllib.request.urlopen(f"http://{self.processes.http}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return float(next((line.rpartition(" ")[2] for line in lines if line.startswith(sample + " ")), "0"))

    def reason(self, name: str) -> str:
        """Why a worker is not ready. Empty: it is."""
        return next(str(w.not_ready_reason) for w in self.processes.state().workers if w.hello.worker_id == name)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    victim, everywhere = Breakage(tmp_path, "victim"), Breakage(tmp_path, "everywhere")
    names = ["prefill-0", "prefill-1", *(f"decode-{n}" for n in range(4))]
    places = dict.fromkeys(names, everywhere.place) | {VICTIM: victim.place}
    with ProcessCluster(ENGINE, prefill=2, decode=4, places=places) as processes:
        yield Cluster(processes, victim, everywhere)


def test_a_broken_decode_worker_costs_no_request_is_ejected_and_comes_back_when_it_is_whole(cluster: Cluster) -> None:
    """(1) Its memory breaks; (2) all requests are served until it is ejected, and after that; (3) metrics and state tell it;
    (4) it is whole again, and comes back; (5) it serves."""
    end_s = time.monotonic() + BACK_S
    cluster.victim.set()
    attempts = 0
    while not cluster.reason(VICTIM).startswith("ejected: "):
        attempts += sum(outcome.answer.report.attempts - 1 for outcome in cluster.serve())
        assert time.monotonic() < end_s, "it is not ejected"
    assert attempts >= 5
    assert "others served them" in cluster.reason(VICTIM)
    assert all(outcome.answer.report.decode_worker != VICTIM for outcome in cluster.serve())
    time.sleep(1.0)  # metrics are rendered once a second
    assert cluster.metric('pdserve_ejected_workers{role="decode"}') == 1.0
    assert cluster.metric('pdserve_ejections_total{cause="failures",role="decode"}') == 1.0
    cluster.victim.mend()
    cluster.processes.wait_whole(BACK_S)
    end_s = time.monotonic() + BACK_S
    while all(outcome.answer.report.decode_worker != VICTIM for outcome in cluster.serve()):
        assert time.monotonic() < end_s, "it does not serve"
    time.sleep(1.0)
    assert cluster.metric('pdserve_ejected_workers{role="decode"}') == 0.0
    assert cluster.metric('pdserve_ejections_total{cause="failures",role="decode"}') == 1.0


def hostile(cluster: Cluster, token: int, count: int) -> list[inference_pb2.GenerateRequest]:
    """Requests whose last prompt token is no number on any worker."""
    sampling: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    ids = [[one for one in prompt(60, 1000 + n) if one != token] for n in range(count)]
    return [request([*each, token], AUTO, **sampling) for each in ids]


def test_a_hostile_prompt_that_fails_on_every_worker_ejects_nobody(cluster: Cluster) -> None:
    """(1) A token is no number anywhere; (2) many requests with it come among others; (3) they fail, and all others are
    served; (4) nobody was ejected."""
    used = {token for one, ids in zip(ASKED, cluster.expected, strict=True) for token in (*one.tokens.ids, *ids)}
    token = next(token for token in range(1, 512) if token not in used)
    cluster.everywhere.set(token)
    cluster.victim.set(token)
    for _ in range(4):
        with Load(cluster.processes.grpc, hostile(cluster, token, 16)) as load:
            cluster.serve()
            failed = load.finish()
        assert {outcome.reason for outcome in failed} == {"numerical_error"}
        cluster.processes.wait_whole()
    time.sleep(1.0)
    assert (
        cluster.metric('pdserve_ejected_workers{role="decode"}')
        == cluster.metric('pdserve_ejected_workers{role="prefill"}')
        == 0.0
    )
    for role in ("prefill", "decode"):
        assert cluster.metric(f'pdserve_ejections_total{{cause="failures",role="{role}"}}') == 0.0
