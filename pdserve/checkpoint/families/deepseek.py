"""The families DeepSeek-V2 and DeepSeek-V3: latent attention, and mixtures with groups of experts and shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pdserve.checkpoint.families.family import Family
from pdserve.checkpoint.families.llama import NAMES
from pdserve.checkpoint.families.settings import activation, check_settings, flag, layer_count, must_be
from pdserve.checkpoint.numbers import integer, real
from pdserve.checkpoint.rope import read_rope, rope_settings, yarn_size
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import DenseSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec, NormSpec

LATENT_EPS: Final = 1e-6
"""The eps of the norms of latent vectors. The published code fixes it, whatever `rms_norm_eps` is."""
_LAYER: Final = "model.layers.{layer}."
_ATTENTION: Final = {
    "q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj", "kv_a": "kv_a_proj_with_mqa",
    "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj",
}  # fmt: skip
_MATRICES: Final = ("gate", "up", "down")


def read_deepseek_v2(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration. See `Family.read` for the errors."""
    check_settings(config, "n_routed_experts")
    must_be(config, "scoring_func", "softmax")
    must_be(config, "norm_topk_prob", False)
    must_be(config, "topk_method", "greedy", "group_limited_greedy")
    grouped = config.get("topk_method") == "group_limited_greedy"
    mixture = MoeSpec(
        **_experts(config),
        renormalise=False,
        scale=real({"routed_scaling_factor": 1.0, **config}, "routed_scaling_factor"),
        groups=integer(config, "n_group") if grouped else 1,
        top_groups=integer(config, "topk_group") if grouped else 1,
    )
    return _spec(config, mixture, neighbours=True)


def read_deepseek_v3(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration. See `Family.read` for the errors.

    The module that predicts a second token (`num_nextn_predict_layers`) is not read: it does not change what is computed.
    """
    check_settings(config, "n_routed_experts", "rope_interleave")
    must_be(config, "scoring_func", "sigmoid")
    must_be(config, "topk_method", "noaux_tc")
    mixture = MoeSpec(
        **_experts(config),
        score="sigmoid",
        renormalise=flag(config, "norm_topk_prob", True),
        scale=real({"routed_scaling_factor": 2.5, **config}, "routed_scaling_factor"),
        correction_bias=True,
        groups=integer(config, "n_group"),
        top_groups=integer(config, "topk_group"),
        group_score="best_two",
    )
    return _spec(config, mixture, neighbours=flag(config, "rope_interleave", True))


def _experts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a mixture that both families read alike."""
    must_be(config, "moe_layer_freq", 1)
    width = integer(config, "moe_intermediate_size")
    return {
        "experts": integer(config, "n_routed_experts"),
        "experts_per_token": integer(config, "num_experts_per_tok"),
        "intermediate": width,
        "shared": width * integer(config, "n_shared_experts"),
        "activation": activation(config),
    }


def _spec(config: Mapping[str, Any], mixture: MoeSpec, *, neighbours: bool) -> ModelSpec:
    norm, attention = NormSpec(real(config, "rms_norm_eps", or_zero=True)), _attention(config, neighbours)
    dense = DenseSpec(integer(config, "intermediate_size"), mixture.activation)
    layers, first = layer_count(config), config["first_k_dense_replace"]
    if type(first) is not int or not 0 <= first <= layers:
        raise ConfigError(f"first_k_dense_replace must be an integer from 0 to {layers}, got {first!r:.100}")
    return ModelSpec(
        vocab_size=integer(config, "vocab_size"),
        hidden_size=integer(config, "hidden_size"),
        layers=tuple(LayerSpec(attention, dense if layer < first else mixture, norm) for layer in range(layers)),
        norm=norm,
        max_position=integer(config, "max_position_embeddings"),
        tied_head=flag(config, "tie_word_embeddings", False),
    )


def _attention(config: Mapping[str, Any], neighbours: bool) -> MlaSpec:
    heads = integer(config, "num_attention_heads")
    must_be(config, "num_key_value_heads", heads)
    nope, turned = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    if turned % 2:
        raise ConfigError(f"qk_rope_head_dim {turned} is odd, and rotary positions need pairs")
    return MlaSpec(
        heads=heads,
        kv_rank=integer(config, "kv_lora_rank"),
        nope_dim=nope,
        rope_dim=turned,
        v_dim=integer(config, "v_head_dim"),
        rope=replace(read_rope(config), neighbours=neighbours),
        norm=NormSpec(LATENT_EPS),
        q_rank=None if config["q_lora_rank"] is None else integer(config, "q_lora_rank"),
        scale=_scale(config, nope + turned),
    )


def _scale(config: Mapping[str, Any], qk_dim: int) -> float | None:
    """Return the factor of scores. YaRN with `mscale_all_dim` enlarges it (published code, `softmax_scale`)."""
    rope, scaling = rope_settings(config), read_rope(config).scaling
    if scaling is None or not rope.get("mscale_all_dim"):
        return None
    size = yarn_size(scaling.factor, real(rope, "mscale_all_dim"))
    return float(qk_dim**-0.5 * size * size)


NAMES_OF_DEEPSEEK: Final = replace(
    NAMES,
    layer={
        **{part: name for part, name in NAMES.layer.items() if part not in ("k", "v") and not part.endswith("_bias")},
        **{part: f"{_LAYER}self_attn.{name}.weight" for part, name in _ATTENTION.items()},
        "router": _LAYER + "mlp.gate.weight",
        "router_bias": _LAYER + "mlp.gate.e_score_correction_bias",
        **{f"expert_{part}": f"{_LAYER}mlp.experts.{{expert}}.{part}_proj.weight" for part in _MATRICES},
        **{f"shared_{part}": f"{_LAYER}mlp.shared_experts.{part}_proj.weight" for part in _MATRICES},
    },
)
DEEPSEEK_V2: Final = Family("DeepseekV2ForCausalLM", read_deepseek_v2, NAMES_OF_DEEPSEEK)
DEEPSEEK_V3: Final = Family(
    "DeepseekV3ForCausalLM", read_deepseek_v3, replace(NAMES_OF_DEEPSEEK, later=_LAYER)
)  # a module that predicts one more token is stored like a layer past the last


def deepseek_v2() -> Family:
    """Return the family DeepSeek-V2."""
    return DEEPSEEK_V2


def deepseek_v3() -> Family:
    """Return the family DeepSeek-V3."""
    return DEEPSEEK_V3
