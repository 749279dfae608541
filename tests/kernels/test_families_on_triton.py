"""Whole tiny models of each family on Triton kernels, with decode steps from recordings, against the torch decoder."""

from __future__ import annotations

import pytest
from kernel_cases import DEVICE
from test_recorded_decode import record_nothing, steps

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB, EngineConfig
from pdserve.engine.kernels.ops import TritonOps
from pdserve.engine.models import choice, graphs
from pdserve.engine.runner import ModelRunner
from testkit.random_models import RANDOM_MODELS, write_random


def runners(directory, kv_cache_dtype: str) -> tuple[ModelRunner, ModelRunner]:
    card = ModelCard.load(directory)
    settings = {"dtype": "float32", "max_num_seqs": 2, "kv_cache_dtype": kv_cache_dtype}
    by_torch = ModelRunner.load(directory, card, EngineConfig(device="cpu", kv_cache_memory=4 * MIB, **settings))
    if DEVICE.type == "cuda":
        return by_torch, ModelRunner.load(directory, card, EngineConfig(device="cuda", kv_cache_memory=4 * MIB, **settings))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choice, "triton_usable", lambda device: True)
        patch.setattr(graphs, "cuda_recorder", lambda: record_nothing)
        return by_torch, ModelRunner.load(directory, card, EngineConfig(device="cpu", kv_cache_memory=4 * MIB, **settings))


def check(name: str, directory, kv_cache_dtype: str, lengths: list[int], decodes: int, **settings: int) -> None:
    pytest.importorskip("transformers")
    write_random(directory, name, **settings)
    by_torch, by_triton = runners(directory, kv_cache_dtype)
    assert isinstance(by_triton._model._model._backend.ops[0], TritonOps)
    for plan in steps(lengths, decodes, len(by_torch.kv.caches), seed=1):
        expected, found = by_torch.logits(plan), by_triton.logits(plan).cpu()
        # A number of a quantised pool may lie between two stored ones, and the last bit of a sum decides.
        bound = 1e-4 if kv_cache_dtype == "auto" else 2e-3
        assert (found - expected).abs().max() < bound * expected.abs().max()


def test_a_model_with_latent_keys_and_experts_runs_on_triton(tmp_path):
    check("deepseek-v3", tmp_path, "auto", [5], 1, num_hidden_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [
        *((name, "auto") for name in RANDOM_MODELS),
        *((name, kind) for name in ("gemma3", "deepseek-v3") for kind in ("int8", "int4")),
    ],
)
def test_triton_gives_the_logits_of_torch(name, kv_cache_dtype, tmp_path):
    check(name, tmp_path, kv_cache_dtype, [20, 3], 2)
