"""The name of an engine's numerics: equal for equal bits, another for others, none where a token depends on its batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families import registry
from pdserve.checkpoint.families.examples import example
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.model_spec import MoeSpec
from pdserve.engine.layers.latent import LatentPart
from pdserve.engine.layers.moe import MoeMlp
from pdserve.engine.loading.load import stream_weights
from pdserve.engine.native import library
from pdserve.engine.numerics import PROMPT, numerics_of, probe_card
from pdserve.engine.runner import ModelRunner

EXACT = {"dtype": "float32", "batch_invariant": True}
DENSE, WINDOWS, CAPPED = "LlamaForCausalLM", "Gemma3ForCausalLM", "Gemma2ForCausalLM"
EXPERTS, LATENT = "Qwen3MoeForCausalLM", "DeepseekV3ForCausalLM"
FEATURED = (WINDOWS, CAPPED, EXPERTS, LATENT)


@cache
def tiny() -> ModelCard:
    return ModelCard.load(resolve("tiny"))


def card(architecture: str, **sizes: Any) -> ModelCard:
    family = registry.family_of(architecture, None)
    return ModelCard(architecture, architecture, family.read({**example(architecture), **sizes}), family.tensors, (), "served")


def name(served: ModelCard | None = None, **settings: Any) -> str:
    """The name of an engine with made-up weights."""
    served = served or tiny()
    config = EngineConfig(model="tiny", device="cpu", kv_cache_memory=4 * MIB, **({"threads": 1} | settings))

    def read(dtype: torch.dtype, device: torch.device) -> Any:
        return stream_weights(Path(), served, dtype, device, load_format="dummy")

    return numerics_of(ModelRunner.make(served, config, read), served, config)


@pytest.mark.parametrize("architecture", [DENSE, *FEATURED])
@pytest.mark.parametrize(
    "settings", [{"threads": 2}, {"block_size": 32}, {"max_num_seqs": 3, "max_num_batched_tokens": 64}, {"max_model_len": 128}]
)
def test_what_changes_no_bit_changes_no_name(architecture: str, settings: dict[str, Any]) -> None:
    served = card(architecture)
    assert name(served, **EXACT, **settings) == name(served, **EXACT) != ""


@pytest.mark.parametrize("architecture", sorted(registry.FAMILIES))
def test_the_probe_has_the_features_of_the_served_model(architecture: str) -> None:
    """Its prompts are longer than its windows, and not all of its experts are chosen."""
    served, probe = card(architecture).spec, probe_card(card(architecture)).spec
    assert set(probe.features) == set(served.features)
    assert len(probe.layers) >= 2
    for layer in probe.layers:
        assert layer.attention.window is None or layer.attention.window < PROMPT
        assert not isinstance(layer.mlp, MoeSpec) or layer.mlp.experts_per_token < layer.mlp.experts


def test_the_probe_of_a_large_model_is_small() -> None:
    sizes = {
        "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
        "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    }  # fmt: skip
    served = card(LATENT, **sizes)
    assert set(probe_card(served).spec.features) == set(served.spec.features)
    assert probe_card(served).spec.numbers < 10e6


@pytest.mark.parametrize("head_dim", [16, 48, 72, 80])
def test_an_engine_with_odd_heads_is_probed_by_the_code_that_serves(head_dim: int) -> None:
    """Widths that the compiled code needs stay whole, and widths that it does not take stay odd."""
    served = card(DENSE, num_attention_heads=32, num_key_value_heads=16, head_dim=head_dim)
    attention = probe_card(served).spec.layers[0].attention
    assert attention.qk_dim == head_dim
    assert attention.out_width % 64 == 0
    if library.find().library is not None and head_dim % 16 == 0:
        assert name(served, quantization="int8") != ""
    assert name(served, **EXACT) != ""


def attention(**changes: Any) -> Any:
    return lambda spec: replace(
        spec, layers=tuple(replace(layer, attention=replace(layer.attention, **changes)) for layer in spec.layers)
    )


def mlp(**changes: Any) -> Any:
    return lambda spec: replace(spec, layers=tuple(replace(layer, mlp=replace(layer.mlp, **changes)) for layer in spec.layers))


@pytest.mark.parametrize("settings", [EXACT, {}], ids=["torch", "default"])
@pytest.mark.parametrize(
    ("architecture", "change"),
    [
        ("MistralForCausalLM", attention(window=63)),
        (CAPPED, attention(softcap=49.0)),
        (CAPPED, lambda spec: replace(spec, softcap=29.0)),
        (EXPERTS, mlp(experts_per_token=1)),
        (EXPERTS, mlp(renormalise=False)),
        (LATENT, attention(scale=0.2)),
    ],
)
def test_a_feature_that_is_computed_otherwise_is_another_name(architecture: str, change: Any, settings: dict[str, Any]) -> None:
    served = card(architecture)
    if settings or library.find().library is not None:
        assert name(served, **settings) != name(replace(served, spec=change(served.spec)), **settings)


@pytest.mark.parametrize(
    ("architecture", "part", "method"),
    [(EXPERTS, MoeMlp, "__call__"), (LATENT, LatentPart, "after"), (LATENT, MoeMlp, "__call__")],
)
def test_one_other_bit_of_a_feature_is_another_name(
    architecture: str, part: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, dense = card(architecture), card(DENSE)
    usual, usual_dense, compute = name(served, **EXACT), name(dense, **EXACT), getattr(part, method)

    def nudged(self: Any, *args: Any) -> Any:
        found = compute(self, *args)
        return found.index_put((torch.tensor(-1), torch.tensor(7)), found[-1, 7].nextafter(found[-1, 7] + 1))

    monkeypatch.setattr(part, method, nudged)
    assert name(served, **EXACT) not in ("", usual)
    assert name(dense, **EXACT) == usual_dense


def test_each_format_has_a_name_of_its_own() -> None:
    kinds: list[dict[str, Any]] = [EXACT, EXACT | {"kv_cache_dtype": "bf16"}]
    if library.find().library is not None:
        kinds += [{}, {"quantization": "int8"}, {"quantization": "int4"}]
    assert len({name(**kind) for kind in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("architecture", "quantization"),
    [(one, kind) for one in (DENSE, *FEATURED) for kind in (None, "int8", "int4") if one != LATENT or kind is None],
)
def test_all_instruction_sets_that_run_here_have_one_name(
    architecture: str, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [path for isa in library.SETS if (path := library.installed(f"_kernels_{isa}")) is not None]
    found = [one.library for path in paths if (one := library.open_library(path)).library is not None]
    names = set()
    for one in found:
        monkeypatch.setattr(library, "load", lambda one=one: one)
        names.add(name(card(architecture), quantization=quantization))
    assert len(names) == min(1, len(found))
    assert "" not in names


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"kv_cache_dtype": "int8"}])
def test_an_engine_whose_tokens_depend_on_the_batch_has_no_name(settings: dict[str, Any]) -> None:
    assert name(**settings) == ""


def test_one_other_bit_is_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another machine, compiler or library gives it."""
    usual, logits = name(**EXACT), ModelRunner.logits

    def nudged(self: ModelRunner, plan: Any) -> Any:
        found = logits(self, plan)
        return found.index_put((torch.tensor(-1), torch.tensor(7)), found[-1, 7].nextafter(found[-1, 7] + 1))

    monkeypatch.setattr(ModelRunner, "logits", nudged)
    assert name(**EXACT) not in ("", usual)
