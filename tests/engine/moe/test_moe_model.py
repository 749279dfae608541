"""A model with mixtures of experts: the bits of a token, the counts of experts, and refusals."""

from __future__ import annotations

import math
import random
from functools import cache

import pytest
import torch
from torch import Tensor

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families.llama import NAMES
from pdserve.config import MIB, EngineConfig
from pdserve.core.model_spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec
from pdserve.core.step_plan import StepPlan
from pdserve.engine.models.weights import DenseWeights, GqaWeights, LayerWeights, ModelWeights, MoeWeights
from pdserve.engine.runner import ModelRunner

NORM, ATTENTION, HIDDEN, VOCAB = NormSpec(1e-5), AttentionSpec(4, 2, 16, 16, RopeSpec(1e4)), 64, 512
MLPS = (
    DenseSpec(80),
    MoeSpec(6, 2, 40, shared=48, shared_gate=True),
    MoeSpec(8, 3, 40, "sigmoid", True, 2.5, True, 4, 2, "best_two", 40),
)
SPEC = ModelSpec(VOCAB, HIDDEN, tuple(LayerSpec(ATTENTION, mlp, NORM) for mlp in MLPS), NORM, 1024, True)
CARD = ModelCard("mixed", "MixedForCausalLM", SPEC, NAMES, (2,), "0" * 16)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / math.sqrt(shape[-1])


def dense(width: int) -> DenseWeights:
    return DenseWeights(draw(2 * width, HIDDEN), draw(HIDDEN, width))


def mlp_of(spec: DenseSpec | MoeSpec) -> DenseWeights | MoeWeights:
    if isinstance(spec, DenseSpec):
        return dense(spec.intermediate)
    return MoeWeights(
        2 * draw(spec.experts, HIDDEN),
        draw(spec.experts, 2 * spec.intermediate, HIDDEN),
        draw(spec.experts, HIDDEN, spec.intermediate),
        draw(1, spec.experts)[0] if spec.correction_bias else None,
        dense(spec.shared),
        draw(1, HIDDEN) if spec.shared_gate else None,
    )


def weights(dtype: torch.dtype) -> ModelWeights:
    ones, embedding = torch.ones(HIDDEN), 4 * draw(VOCAB, HIDDEN)
    layers = [
        LayerWeights(ones, GqaWeights(draw(128, HIDDEN), draw(HIDDEN, 64)), ones, mlp_of(layer.mlp)) for layer in SPEC.layers
    ]
    return ModelWeights(embedding, tuple(layers), ones, embedding).map(lambda tensor: tensor.to(dtype))


@cache
def runner_of(dtype: str, invariant: bool) -> ModelRunner:
    config = EngineConfig(dtype=dtype, kv_cache_memory=16 * MIB, max_model_len=512, batch_invariant=invariant)
    return ModelRunner.make(CARD, config, lambda own, _: weights(own))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_chunking_in_any_company_equals_whole_and_alone(make_sheets, dtype):
    runner, rng = runner_of(dtype, True), random.Random(1)
    assert runner.describe().startswith("torch")
    sheets = make_sheets(runner, [1, 33, 70], rng)
    alone = [runner.logits(sheet.whole()) for sheet in sheets]
    done: list[list[Tensor]] = [[] for _ in sheets]
    starts = [0] * len(sheets)
    while unfinished := [i for i, sheet in enumerate(sheets) if starts[i] < len(sheet.tokens)]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        ends = {i: min(len(sheets[i].tokens), starts[i] + rng.choice([1, 7, 40])) for i in chosen}
        logits = runner.logits(StepPlan(tuple(sheets[i].piece(starts[i], ends[i]) for i in chosen)))
        for i, part in zip(chosen, logits.split([ends[i] - starts[i] for i in chosen]), strict=True):
            done[i].append(part)
            starts[i] = ends[i]
    assert all(torch.equal(expected, torch.cat(found)) for expected, found in zip(alone, done, strict=True))


def test_fast_steps_are_those_of_invariant_ones_but_for_the_last_bits(make_sheets):
    fast, exact = runner_of("float32", False), runner_of("float32", True)
    (sheet,) = make_sheets(fast, [60], random.Random(2))
    expected = exact.logits(sheet.whole())
    assert (fast.logits(sheet.whole()) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("invariant", [False, True])
def test_the_spread_over_experts_counts_the_tokens_of_steps_alone(make_sheets, invariant):
    """Neither padding, nor the trial of row counts, nor the dense layer."""
    runner_of.cache_clear()
    runner = runner_of("float32", invariant)
    assert runner.expert_load() is None
    for sheet in make_sheets(runner, [41, 5], random.Random(3)):
        runner.logits(sheet.whole())
    load = runner.expert_load()
    assert load.choices == 46 * (2 + 3)
    assert sorted(one.layer for one in load.hottest) == [1, 2]
    assert 1 <= load.imbalance <= load.worst_imbalance <= 8 / 3


def test_a_model_without_experts_tells_no_spread(make_runner, make_sheets):
    for settings in ({"dtype": "float32"}, {"dtype": "bfloat16"}):
        runner = make_runner(**settings)
        runner.logits(make_sheets(runner, [5], random.Random(4))[0].whole())
        assert runner.expert_load() is None
