"""The compiled code on models of the families, beside transformers in float64. It computes in bfloat16, so it is only near."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from family_models import LENGTH, Made, Sheet, write_model
from test_family_mutants import LAYERS, MODELS, edited, mutated

from pdserve.core.model_spec import ModelSpec, MoeSpec
from pdserve.engine.loading.load import load_weights
from pdserve.engine.models.weights import ModelWeights
from tests.engine.engine_ways import COMPILED

pytestmark = COMPILED
TOLERANCE = 0.05
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


DROWNED = (
    "another eps of head norms",
    "the scale of the head, not that of the model",
    "the eps of the model in latent norms",
    "the eps of the model in the norm of KV alone",
    "the best two scores of a group, not the best",
)
"""Mistakes whose errors are as small as those of rounding to bfloat16. Only the comparison in float32 shows them."""


@pytest.fixture(scope="module")
def rounded(tmp_path_factory) -> Callable[[str], Made]:
    """rounded(name): a model of `FITTING`, of which also the reference has weights rounded to bfloat16."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    models: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in models:
            models[name] = write_model(tmp_path_factory.mktemp(name), name, rounded=True, **FITTING[name])
        return models[name]

    return make


def error_of(model: Made, spec: ModelSpec | None = None, weights: ModelWeights | None = None) -> float:
    """Return the error of the worst row; in a mixture of the middle one, because rounding decides between two experts of nearly
    equal scores."""
    runner = model.runner(spec, weights, dtype="bfloat16", threads=1)
    assert runner.compiled
    difference = runner.logits(Sheet.of(runner, model.ids).whole()) - model.reference
    rows = difference.square().mean(1).sqrt() / model.reference.square().mean().sqrt()
    mixture = any(isinstance(layer.mlp, MoeSpec) for layer in model.card.spec.layers)
    torch.set_num_threads(1)
    return float(rows.sort().values[LENGTH // 2 if mixture else -1])


def held_by(model: Made) -> ModelWeights:
    return load_weights(model.directory, model.card, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("name", FITTING)
def test_logits_are_those_of_transformers_up_to_rounding(rounded, name):
    assert error_of(rounded(name)) < TOLERANCE


@pytest.mark.parametrize("name", [name for name, (model, _) in LAYERS.items() if model in FITTING and name not in DROWNED])
def test_the_compiled_code_shows_a_mistake_in_layers(rounded, name):
    model = rounded(LAYERS[name][0])
    assert error_of(model, *mutated(model.card.spec, held_by(model), LAYERS[name][1])) > TOLERANCE


@pytest.mark.parametrize("name", [name for name, (model, _) in MODELS.items() if model in FITTING])
def test_the_compiled_code_shows_a_mistake_around_layers(rounded, name):
    model = rounded(MODELS[name][0])
    assert error_of(model, edited(model.card.spec, MODELS[name][1]), held_by(model)) > TOLERANCE
