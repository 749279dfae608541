"""The Llama family: RMS norms, rotary positions, grouped-query attention, a gated MLP, no biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pdserve.checkpoint.families.family import Family, LayerNames, TensorNames
from pdserve.checkpoint.numbers import integer, real
from pdserve.checkpoint.rope import read_rope
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec

MOST_LAYERS: Final = 4096
NAMES: Final = TensorNames(
    embedding="model.embed_tokens.weight",
    layer=LayerNames(
        attention_norm="model.layers.{}.input_layernorm.weight",
        q="model.layers.{}.self_attn.q_proj.weight",
        k="model.layers.{}.self_attn.k_proj.weight",
        v="model.layers.{}.self_attn.v_proj.weight",
        attention_out="model.layers.{}.self_attn.o_proj.weight",
        mlp_norm="model.layers.{}.post_attention_layernorm.weight",
        gate="model.layers.{}.mlp.gate_proj.weight",
        up="model.layers.{}.mlp.up_proj.weight",
        down="model.layers.{}.mlp.down_proj.weight",
    ),
    norm="model.norm.weight",
    head="lm_head.weight",
    ignored=("rotary_emb.inv_freq",),  # a buffer of old checkpoints; the engine computes it
)


def read_llama(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration, in which all layers are alike. See `Family.read` for the errors."""
    check_plain(config)
    kv_heads = integer(config, "num_key_value_heads", integer(config, "num_attention_heads"))
    return spec_of(config, [kv_heads] * layer_count(config))


def layer_count(config: Mapping[str, Any]) -> int:
    """Return the number of layers. Raises `ConfigError` above `MOST_LAYERS`, before anything is made for each layer."""
    layers = integer(config, "num_hidden_layers")
    if layers > MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers {layers} is over the limit of {MOST_LAYERS}")
    return layers


def spec_of(config: Mapping[str, Any], kv_heads: Sequence[int]) -> ModelSpec:
    """Return the spec of a Llama-like configuration whose layers have these numbers of KV heads."""
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    for count in kv_heads:
        if heads % count:
            raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {count}")
    head_dim = integer(config, "head_dim", max(1, hidden // heads))
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd, and rotary positions need pairs")
    theta, scaling = read_rope(config)
    return llama_spec(
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=integer(config, "max_position_embeddings"),
        rope=RopeSpec(theta, scaling),
        eps=real(config, "rms_norm_eps", or_zero=True),
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def llama_spec(
    *,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    heads: int,
    kv_heads: Sequence[int],
    head_dim: int,
    max_position: int,
    rope: RopeSpec,
    eps: float,
    tied_head: bool,
) -> ModelSpec:
    """Return the spec of a decoder whose layers differ only in their numbers of KV heads, one for each layer."""
    norm = NormSpec(eps)
    layers = tuple(
        LayerSpec(AttentionSpec(heads, count, head_dim, head_dim, rope), DenseSpec(intermediate_size), norm)
        for count in kv_heads
    )
    return ModelSpec(vocab_size, hidden_size, layers, norm, max_position, tied_head)


def check_plain(config: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a feature that a Llama lacks, because it would otherwise serve wrong tokens."""
    for name in ("attention_bias", "mlp_bias", "quantization_config"):
        if config.get(name):
            raise ConfigError(f"{name} is not supported")
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not supported; supported: 'silu'")


LLAMA: Final = Family("LlamaForCausalLM", read_llama, NAMES)


def family() -> Family:
    """Return the family."""
    return LLAMA
