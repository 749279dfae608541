"""A model with mixtures of experts through real processes and NIXL: disaggregated equals colocated, and the spread is told."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import pytest
from real_service import APART, BOUND_S, QUICK_BEATS, TOGETHER, tiny

from testkit.client import generate_all, request
from testkit.processes import ProcessCluster
from testkit.random_models import write_random

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessCluster]:
    pytest.importorskip("transformers")
    directory = tmp_path_factory.mktemp("qwen2-moe")
    write_random(directory, "qwen2-moe")
    with ProcessCluster(tiny(model=str(directory)), worker=QUICK_BEATS) as made:
        yield made
        made.assert_empty()


def test_experts_give_the_same_tokens_apart_and_together_and_the_spread_is_told(cluster: ProcessCluster) -> None:
    """(1) Prompts of several chunks, all at once and one by one. (2) Both workers tell the spread. (3) Operators see it."""
    rng = random.Random(1)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (1, 16, 65, 150)]
    found = []
    for placement, concurrency in ((APART, 4), (TOGETHER, 4), (APART, 1)):
        messages = [request(ids, placement, max_tokens=12, ignore_eos=True, temperature=1.0, seed=5) for ids in prompts]
        found.append([answer.ids for answer in generate_all(cluster.grpc, messages, concurrency=concurrency)])
    assert found[0] == found[1] == found[2]

    def told(state: object) -> bool:
        return all(worker.load.experts.choices for worker in state.workers)  # type: ignore[attr-defined]

    for worker in cluster.wait_state(told).workers:
        load = worker.load.experts
        assert load.choices % (2 * 3) == 0, "two layers of three experts a token"
        assert 1 <= load.imbalance <= load.worst_imbalance <= 6 / 3
        assert {one.layer for one in load.hottest} == {0, 2}, "layer 1 is dense"

    command = [sys.executable, "-m", "pdserve.cli", "status", "--json", "--address", cluster.admin]
    shown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=BOUND_S).stdout)
    assert all(worker["load"]["experts"]["hottest"] for worker in shown["workers"])
    with urllib.request.urlopen(f"http://{cluster.http}/metrics?workers=1", timeout=BOUND_S) as answer:
        lines = answer.read().decode().splitlines()
    assert sum(line.startswith("pdserve_worker_expert_imbalance{") for line in lines) == 2
