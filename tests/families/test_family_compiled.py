"""The compiled code on models of the families, beside transformers in float64. It computes in bfloat16, so it is only near."""

from __future__ import annotations

import random

import pytest
import torch
from family_models import LENGTH, Sheet

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB, EngineConfig
from pdserve.core.model_spec import MoeSpec
from pdserve.engine.runner import ModelRunner
from testkit.random_models import reference_logits, write_random
from tests.engine.engine_ways import COMPILED

pytestmark = COMPILED
LATENT = {"q_lora_rank": 48, "qk_rope_head_dim": 16, "v_head_dim": 32}
FITTING = {
    "phi3": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma2": {"head_dim": 32},
    "gemma3": {"head_dim": 32},
    "mixtral": {},
    "qwen2-moe": {"shared_expert_intermediate_size": 64},
    "deepseek-v2": LATENT,
    "deepseek-v2-lite": {**LATENT, "q_lora_rank": None},
    "deepseek-v3": LATENT,
}
"""Settings that make all widths multiples of 16, as the compiled code needs them."""


@pytest.mark.parametrize("name", FITTING)
def test_logits_are_those_of_transformers_up_to_rounding(tmp_path, name):
    """The reference has the rounded weights. In a mixture half of the rows are compared, because rounding decides between two
    experts of nearly equal scores."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    model = write_random(tmp_path, name, **FITTING[name])
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.bfloat16())
    ids = tuple(random.Random(name).choices(range(512), k=LENGTH))
    reference, card = reference_logits(model, list(ids)), ModelCard.load(tmp_path)
    config = EngineConfig(kv_cache_memory=4 * MIB, dtype="bfloat16", max_model_len=256, threads=1)
    runner = ModelRunner.load(tmp_path, card, config)
    assert runner.compiled
    rows = (runner.logits(Sheet.of(runner, ids).whole()) - reference).square().mean(1).sqrt() / reference.square().mean().sqrt()
    mixture = any(isinstance(layer.mlp, MoeSpec) for layer in card.spec.layers)
    assert float(rows.sort().values[LENGTH // 2 if mixture else -1]) < 0.05
    torch.set_num_threads(1)
