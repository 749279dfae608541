"""The families of Qwen's mixtures of experts: Qwen2-MoE, which has a shared expert behind a gate, and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pdserve.checkpoint.families.family import Family
from pdserve.checkpoint.families.llama import NAMES, attending, plain_spec, with_mlps
from pdserve.checkpoint.families.qwen import QWEN3, normed_heads
from pdserve.checkpoint.families.settings import check_settings, expert_count, flag, layer_count, must_be
from pdserve.checkpoint.numbers import integer
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import DenseSpec, Mlp, ModelSpec, MoeSpec

_MLP: Final = "model.layers.{layer}.mlp."
_EXPERTS: Final = {
    "router": _MLP + "gate.weight",
    **{f"expert_{part}": f"{_MLP}experts.{{expert}}.{part}_proj.weight" for part in ("gate", "up", "down")},
}
_SHARED: Final = {
    **{f"shared_{part}": f"{_MLP}shared_expert.{part}_proj.weight" for part in ("gate", "up", "down")},
    "shared_expert_gate": _MLP + "shared_expert_gate.weight",
}
_READS: Final = ("num_experts", "num_local_experts", "sliding_window")


def read_qwen2_moe(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration, of which each expert layer has a shared expert. See `Family.read`."""
    check_settings(config, "qkv_bias", *_READS)
    spec = attending(plain_spec(config), bias=flag(config, "qkv_bias", True))
    return _mixed(spec, config, shared=integer(config, "shared_expert_intermediate_size"))


def read_qwen3_moe(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration. See `Family.read` for the errors."""
    check_settings(config, "attention_bias", *_READS)
    must_be(config, "shared_expert_intermediate_size", 0)
    return _mixed(normed_heads(plain_spec(config), config), config, shared=0)


def _mixed(spec: ModelSpec, config: Mapping[str, Any], shared: int) -> ModelSpec:
    """Return the spec with a mixture in each layer that `decoder_sparse_step` counts and `mlp_only_layers` does not name."""
    dense = spec.layers[0].mlp
    assert isinstance(dense, DenseSpec), "the Llama that it starts from is dense"
    mixture = MoeSpec(
        expert_count(config),
        integer(config, "num_experts_per_tok"),
        integer(config, "moe_intermediate_size"),
        renormalise=flag(config, "norm_topk_prob", False),
        shared=shared,
        shared_gate=shared > 0,
        activation=dense.activation,
    )
    step, plain = integer(config, "decoder_sparse_step", 1), _plain_layers(config)

    def mlp_of(layer: int) -> Mlp:
        return dense if layer in plain or (layer + 1) % step else mixture

    return with_mlps(spec, mlp_of)


def _plain_layers(config: Mapping[str, Any]) -> list[int]:
    named = config.get("mlp_only_layers") or []
    count = layer_count(config)
    if not isinstance(named, list) or any(type(layer) is not int or not 0 <= layer < count for layer in named):
        raise ConfigError(f"mlp_only_layers must be a list of numbers of the {count} layers, got {named!r:.200}")
    return named


QWEN2_MOE: Final = Family("Qwen2MoeForCausalLM", read_qwen2_moe, replace(NAMES, layer={**NAMES.layer, **_EXPERTS, **_SHARED}))
QWEN3_MOE: Final = Family(
    "Qwen3MoeForCausalLM", read_qwen3_moe, replace(QWEN3.tensors, layer={**QWEN3.tensors.layer, **_EXPERTS})
)


def qwen2_moe() -> Family:
    """Return the family Qwen2-MoE."""
    return QWEN2_MOE


def qwen3_moe() -> Family:
    """Return the family Qwen3-MoE."""
    return QWEN3_MOE
