"""The families Gemma 2 and Gemma 3: norms before and after attention and MLP, local and global layers, bounded scores.

Norms add one to their weights, the embedding is multiplied by the root of its width, and Gemma 3 norms queries and keys by
head. Local layers have a window, and in Gemma 3 other frequencies than global layers. Models that take images as well are read
as their language model alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from pdserve.checkpoint.families.family import Family
from pdserve.checkpoint.families.llama import NAMES, attending, plain_spec
from pdserve.checkpoint.families.settings import check_settings, flag, windows_of
from pdserve.checkpoint.numbers import integer, real
from pdserve.checkpoint.rope import read_rope
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import AttentionSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec

_DEFAULTS: Final = {"tie_word_embeddings": True, "query_pre_attn_scalar": 256, "head_dim": 256}
_THETAS: Final = {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
"""The thetas of Gemma 3's global and local layers outside of `rope_parameters`, with their defaults."""
TEXT_DEFAULTS: Final = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""What `text_config` of published models with images leaves out: the defaults of transformers' `Gemma3TextConfig`."""
_READS: Final = ("attention_bias", "sliding_window", "sliding_window_pattern", "layer_types", "final_logit_softcapping")
_LAYER: Final = {
    "post_attention_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm.weight",
    "post_mlp_norm": "model.layers.{layer}.post_feedforward_layernorm.weight",
}
_QK_NORMS: Final = {
    "q_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{layer}.self_attn.k_norm.weight",
}


def read_gemma2(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration. Every second layer is local. See `Family.read` for the errors."""
    check_settings(config, "attn_logit_softcapping", *_READS)
    config = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096, **_gated(config)}
    windows = windows_of(config, lambda layer: layer % 2 == 0)
    return attending(_base(config), windows, softcap=_bound(config, "attn_logit_softcapping"))


def read_gemma3(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration. Every sixth layer is global. See `Family.read` for the errors.

    `attn_logit_softcapping` is refused, because the reference has the setting and does not use it.
    """
    check_settings(config, *_READS)
    config = {"sliding_window": 4096, **_gated(config)}
    pattern = integer(config, "sliding_window_pattern", 6)
    ropes = _ropes(config)
    spec = _base({**config, "rope_parameters": None, "rope_scaling": None})
    spec = attending(spec, windows_of(config, lambda layer: (layer + 1) % pattern > 0), qk_norm=spec.norm)
    return replace(spec, layers=tuple(_turned(layer, *ropes) for layer in spec.layers))


def read_gemma3_text(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of the language model inside a model that also takes images. See `Family.read` for the errors.

    `final_logit_softcapping` is refused, because the reference has the setting and does not use it.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config must be an object, got {text!r:.100}")
    check_settings({name: value for name, value in config.items() if name != "text_config"})
    check_settings({"final_logit_softcapping": text.get("final_logit_softcapping")})
    tied = config.get("tie_word_embeddings")
    return read_gemma3({**TEXT_DEFAULTS, **({} if tied is None else {"tie_word_embeddings": tied}), **text})


def _gated(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with the name that Gemma gives to the function of the gate."""
    return {**_DEFAULTS, **config, "hidden_act": config.get("hidden_activation") or "gelu_pytorch_tanh"}


def _base(config: Mapping[str, Any]) -> ModelSpec:
    """Return what both families share."""
    spec, bias = plain_spec(config), flag(config, "attention_bias", False)
    scale = real(config, "query_pre_attn_scalar") ** -0.5
    spec = attending(spec, scale=scale, bias=bias, out_bias=bias)
    norm = NormSpec(spec.norm.eps, offset=1.0)
    layers = tuple(replace(layer, norms=norm, post_norms=True) for layer in spec.layers)
    root = float(spec.hidden_size**0.5)
    return replace(spec, layers=layers, norm=norm, embedding_scale=root, softcap=_bound(config, "final_logit_softcapping"))


def _bound(config: Mapping[str, Any], name: str) -> float | None:
    return None if config.get(name) is None else real(config, name)


def _ropes(config: Mapping[str, Any]) -> tuple[RopeSpec, RopeSpec]:
    """Return the rotary positions of global and of local layers. In the older spelling only global positions may be scaled."""
    theta, local = ({name: default, **config}[name] for name, default in _THETAS.items())
    rope = config.get("rope_parameters")
    if rope is None:
        return read_rope({**config, "rope_theta": theta}), RopeSpec(
            real({"rope_local_base_freq": local}, "rope_local_base_freq")
        )
    kinds = ("full_attention", "sliding_attention")
    if not isinstance(rope, Mapping) or not all(isinstance(rope.get(kind), Mapping) for kind in kinds):
        raise ConfigError(f"rope_parameters must have an object for each of {' and '.join(kinds)}, got {rope!r:.200}")
    full, sliding = ({"rope_theta": default, **rope[kind]} for kind, default in zip(kinds, (theta, local), strict=True))
    if "rope_local_base_freq" in config and sliding["rope_theta"] != local:
        raise ConfigError(f"rope_local_base_freq is {local!r:.100}, and {sliding['rope_theta']!r:.100} in rope_parameters")
    return read_rope({"rope_parameters": full}), read_rope({"rope_parameters": sliding})


def _turned(layer: LayerSpec, full: RopeSpec, sliding: RopeSpec) -> LayerSpec:
    assert isinstance(layer.attention, AttentionSpec)
    rope = full if layer.attention.window is None else sliding
    return replace(layer, attention=replace(layer.attention, rope=rope))


GEMMA2: Final = Family("Gemma2ForCausalLM", read_gemma2, replace(NAMES, layer={**NAMES.layer, **_LAYER}))
GEMMA3: Final = Family("Gemma3ForCausalLM", read_gemma3, replace(NAMES, layer={**NAMES.layer, **_LAYER, **_QK_NORMS}))

GEMMA3_IMAGES: Final = Family(
    "Gemma3ForConditionalGeneration",
    read_gemma3_text,
    GEMMA3.tensors.under("language_model.", beside=("vision_tower.", "multi_modal_projector.")),
)


def gemma2() -> Family:
    """Return the family Gemma 2."""
    return GEMMA2


def gemma3() -> Family:
    """Return the family Gemma 3."""
    return GEMMA3


def gemma3_images() -> Family:
    """Return the family Gemma 3 with images, of which only the language model is read."""
    return GEMMA3_IMAGES
