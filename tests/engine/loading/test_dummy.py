"""Made-up weights: they need no file, are equal everywhere, and never pass for the model's own."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.engine.loading.dummy import PERIOD, DummyTensors
from pdserve.engine.loading.load import stream_weights
from pdserve.engine.memory.largest_steps import StepLimits, prompt_step
from pdserve.engine.runner import ModelRunner

CPU = torch.device("cpu")


@pytest.fixture
def without_weights(tiny_dir, tmp_path) -> Path:
    shutil.copytree(tiny_dir, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path


def made(name: str, *shape: int, norms: frozenset[str] = frozenset(), offset: float = 0.0) -> torch.Tensor:
    into = torch.full(shape, torch.nan)
    with DummyTensors(norms, offset=offset).opened() as copy:
        copy(name, into)
    return into


def test_a_directory_without_weights_serves_with_another_fingerprint(tiny_dir, without_weights):
    directory = resolve(str(without_weights), load_format="dummy")
    card = ModelCard.load(directory, load_format="dummy")
    assert card.fingerprint != ModelCard.load(tiny_dir).fingerprint
    assert card.fingerprint == ModelCard.load(tiny_dir, load_format="dummy").fingerprint  # so workers agree
    config = EngineConfig(load_format="dummy", device="cpu", kv_cache_memory=1 << 20, dtype="float32")
    one, two = (ModelRunner.load(directory, card, config) for _ in range(2))
    plan = prompt_step(StepLimits(one.kv.num_blocks, 16, 4, 32, one.max_model_len))
    logits = one.logits(plan)
    assert torch.equal(logits, two.logits(plan))
    assert logits.isfinite().all()
    assert 0.1 < float(logits.std()) < 10


def test_the_weights_are_needed_otherwise(without_weights):
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors"):
        resolve(str(without_weights))
    with pytest.raises(ConfigError, match=r"lacks model\.safetensors"):
        ModelCard.load(without_weights)


def test_each_tensor_has_numbers_of_its_own(without_weights):
    card = ModelCard.load(without_weights, load_format="dummy")
    weights = stream_weights(without_weights, card, torch.float32, CPU, load_format="dummy")
    first, second = weights.layers[0], weights.layers[1]
    assert not torch.equal(first.attention.qkv, second.attention.qkv)
    assert torch.equal(first.attention.qkv, weights.layers[0].attention.qkv)
    assert 0.9 < float(first.attention_norm.mean()) < 1.1


@given(st.integers(1, 3), st.integers(-2, 2))
def test_the_table_is_read_round_and_round(turns, more):
    size = turns * PERIOD + more
    found = made("a", 1, size).flatten()
    assert found.isfinite().all()
    assert torch.equal(found[PERIOD:], found[: max(0, size - PERIOD)])


def test_norms_leave_out_what_the_model_adds():
    whole = made("norm", 64, norms=frozenset({"norm"}))
    assert torch.allclose(made("norm", 64, norms=frozenset({"norm"}), offset=1.0), whole - 1, atol=1e-6)
    assert abs(float(made("bias", 4096).mean())) < 0.05
