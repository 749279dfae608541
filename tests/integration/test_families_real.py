"""Models of the families through real processes: what two pools generate together is what one worker generates alone."""

from __future__ import annotations

import random

import pytest
from real_service import APART, QUICK_BEATS, TOGETHER, tiny

from testkit.client import generate_all, request
from testkit.processes import ProcessCluster
from testkit.random_models import write_random

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

LENGTHS = (1, 15, 17, 65, 130)
OUTPUT = 24


@pytest.mark.parametrize("name", ["mistral", "gemma3", "deepseek-v3"])
def test_apart_and_together_give_the_same_tokens(tmp_path, name):
    """Prompts are longer than windows and chunks. The second time, their beginnings are found in the prefix caches."""
    pytest.importorskip("transformers")
    write_random(tmp_path, name)
    rng = random.Random(name)
    shared = rng.choices(range(512), k=max(LENGTHS))
    prompts = [[*shared[: length - 1], rng.randrange(512)] for length in LENGTHS]
    engine = tiny(model=str(tmp_path), enable_prefix_caching=True)
    with ProcessCluster(engine, worker=QUICK_BEATS) as cluster:
        tokens = {}
        for placement in (APART, TOGETHER):
            messages = [
                request(ids, placement, max_tokens=OUTPUT, ignore_eos=True, temperature=1.0, seed=seed)
                for seed, ids in enumerate(prompts)
            ]
            first, again = (generate_all(cluster.grpc, messages, concurrency=count) for count in (len(prompts), 1))
            tokens[placement] = [answer.ids for answer in first]
            assert [answer.ids for answer in again] == tokens[placement]
            assert all(answer.report.attempts == 1 for answer in (*first, *again))
        assert tokens[APART] == tokens[TOGETHER]
        cluster.assert_empty()
