"""The engine's logits are those of transformers in float64, for models of every family in which every parameter is random."""

from __future__ import annotations

import shutil

import pytest
import torch
from family_models import Sheet
from safetensors.torch import load_file, save_file

from pdserve.checkpoint.families.registry import FAMILIES
from pdserve.core.errors import ConfigError
from pdserve.engine.loading.load import load_weights
from testkit.random_models import RANDOM_MODELS

TOLERANCE = 1e-4
"""The largest error relative to the largest logit. Rounding to float32 makes errors of about 1e-6."""


def test_every_family_of_transformers_has_a_model():
    """DeciLM alone is not one: `tests/engine/test_two_kv_groups.py` compares it with a decoder of its own."""
    assert {model.architecture for model in RANDOM_MODELS.values()} == set(FAMILIES) - {"DeciLMForCausalLM"}


@pytest.mark.parametrize("invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("name", RANDOM_MODELS)
def test_logits_of_all_tokens_are_those_of_transformers(made, name, invariant):
    model = made(name)
    runner = model.runner(batch_invariant=invariant)
    assert model.error(runner.logits(Sheet.of(runner, model.ids).whole())) < TOLERANCE


@pytest.mark.parametrize(("layer", "words"), [(3, None), (4, r"unexpected: model\.layers\.4\.enorm\.weight")])
def test_the_module_that_predicts_a_second_token_is_not_read(made, tmp_path, layer, words):
    """DeepSeek-V3 stores it like one more layer. Anything behind it is not known."""
    model = made("deepseek-v3")
    shutil.copytree(model.directory, tmp_path / "v3")
    path = tmp_path / "v3" / "model.safetensors"
    save_file({**load_file(path), f"model.layers.{layer}.enorm.weight": torch.ones(64)}, path, metadata={"format": "pt"})

    def load():
        return load_weights(tmp_path / "v3", model.card, torch.float32, torch.device("cpu"))

    if words is None:
        assert len(load().layers) == 3
    else:
        with pytest.raises(ConfigError, match=words):
            load()
