"""Scheduler, model, sampler and KV pool together."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from engine_ways import WAYS

from pdserve.checkpoint.card import ModelCard
from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import StepPlan
from pdserve.engine.layers import linear
from pdserve.engine.runner import ModelRunner
from tests.engine.serving import serve


@pytest.fixture(scope="module")
def requests():
    rng = random.Random(5)
    made = []
    for i in range(10):
        prompt = tuple(rng.randrange(3, 512) for _ in range(rng.choice([1, 15, 16, 17, 60, 90])))
        made.append((prompt, SamplingParams(max_tokens=40, temperature=i % 2 * 0.8, top_p=0.9, seed=i)))
    return made


@pytest.mark.quick("float32", "*-compiled")
@pytest.mark.parametrize("way", WAYS)
def test_output_does_not_depend_on_company_chunking_or_preemption(make_runner, requests, way):
    """Batch-invariant: (1) each alone, (2) all with ample room, (3) all in a pool so small that some are preempted."""
    runner = make_runner(**way, batch_invariant=True)
    alone = [serve(runner, [request], blocks=64, budget=512)[0][0] for request in requests]
    together, preempted = serve(runner, requests, blocks=256, budget=64)
    assert together == alone
    assert preempted == 0
    squeezed, preempted = serve(runner, requests, blocks=12, budget=24)
    assert squeezed == alone
    assert preempted > 0


def test_fast_and_invariant_modes_agree_on_the_tiny_model(make_runner, requests):
    fast = serve(make_runner(), requests[:4], blocks=64, budget=64)
    exact = serve(make_runner(batch_invariant=True), requests[:4], blocks=64, budget=64)
    assert fast == exact


def test_an_empty_plan_does_nothing(make_runner):
    assert make_runner().execute(StepPlan(())) == []


def test_a_plan_writes_its_own_blocks_only(make_runner, make_sheets):
    runner = make_runner()
    (sheet,) = make_sheets(runner, [20], random.Random(0))
    runner.kv.caches[0].tensor.zero_()
    runner.logits(sheet.whole())
    written = runner.kv.caches[0].tensor.flatten(1).any(1).nonzero().flatten().tolist()
    assert written == sorted(sheet.block_table)


def test_what_a_runner_says_of_itself(tiny_dir):
    card = ModelCard.load(tiny_dir)
    config = EngineConfig(kv_cache_memory=100_000, dtype="auto", threads=1)
    runner = ModelRunner.load(tiny_dir, card, config)
    assert runner.kv.spec.dtype == "bfloat16"
    assert runner.kv.num_blocks == 100_000 // runner.kv.spec.block_bytes
    assert runner.max_model_len == runner.kv.num_blocks * 16
    assert runner.weights_bytes == 2 * 213_568
    assert torch.get_num_threads() == 1


def test_a_context_that_does_not_fit_the_pool_is_refused(tiny_dir):
    config = EngineConfig(kv_cache_memory=100_000, max_model_len=2000)
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        ModelRunner.load(tiny_dir, ModelCard.load(tiny_dir), config)


def test_without_the_packed_kernels_the_plain_ones_are_used(monkeypatch):
    weight = torch.randn(24, 40).bfloat16()
    x = torch.randn(3, 40).bfloat16()
    packed = linear.Linear(linear.scheme_for(weight.device, weight.dtype), weight)(x)
    monkeypatch.setattr(linear, "_packed", lambda _: (_ for _ in ()).throw(AttributeError("no such operator")))
    torch.testing.assert_close(linear.Linear(linear.scheme_for(weight.device, weight.dtype), weight)(x), packed)


def test_a_device_that_is_not_here_is_refused_by_name(tiny_dir: Path) -> None:
    if torch.cuda.is_available():
        assert ModelRunner.load(tiny_dir, ModelCard.load(tiny_dir), EngineConfig(model="tiny", device="cuda")).kv.num_blocks
        return
    with pytest.raises(ConfigError, match="device"):
        ModelRunner.load(tiny_dir, ModelCard.load(tiny_dir), EngineConfig(model="tiny", device="cuda"))
