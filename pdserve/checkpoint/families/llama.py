"""The Llama family: RMS norms, rotary positions, grouped-query attention, a gated MLP. Other families change parts of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pdserve.checkpoint.families.family import Family, TensorNames
from pdserve.checkpoint.families.settings import activation, check_settings, flag, layer_count
from pdserve.checkpoint.numbers import integer, real
from pdserve.checkpoint.rope import read_rope
from pdserve.core.errors import ConfigError
from pdserve.core.model_spec import AttentionSpec, DenseSpec, LayerSpec, Mlp, ModelSpec, NormSpec, RopeSpec

NAMES: Final = TensorNames(
    embedding="model.embed_tokens.weight",
    layer={
        "attention_norm": "model.layers.{layer}.input_layernorm.weight",
        "q": "model.layers.{layer}.self_attn.q_proj.weight",
        "k": "model.layers.{layer}.self_attn.k_proj.weight",
        "v": "model.layers.{layer}.self_attn.v_proj.weight",
        "q_bias": "model.layers.{layer}.self_attn.q_proj.bias",
        "k_bias": "model.layers.{layer}.self_attn.k_proj.bias",
        "v_bias": "model.layers.{layer}.self_attn.v_proj.bias",
        "attention_out": "model.layers.{layer}.self_attn.o_proj.weight",
        "attention_out_bias": "model.layers.{layer}.self_attn.o_proj.bias",
        "mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
        "gate": "model.layers.{layer}.mlp.gate_proj.weight",
        "up": "model.layers.{layer}.mlp.up_proj.weight",
        "down": "model.layers.{layer}.mlp.down_proj.weight",
    },
    norm="model.norm.weight",
    head="lm_head.weight",
    ignored=("rotary_emb.inv_freq",),  # a buffer of old checkpoints; the engine computes it
)


def read_llama(config: Mapping[str, Any]) -> ModelSpec:
    """Return the spec of a published configuration, in which all layers are alike. See `Family.read` for the errors."""
    check_settings(config, "attention_bias")
    bias = flag(config, "attention_bias", False)
    return attending(plain_spec(config), bias=bias, out_bias=bias)


def plain_spec(config: Mapping[str, Any], *, partial_rope: bool = False) -> ModelSpec:
    """Return the spec of a Llama-like configuration in which all layers are alike. See `spec_of`."""
    kv_heads = integer(config, "num_key_value_heads", integer(config, "num_attention_heads"))
    return spec_of(config, [kv_heads] * layer_count(config), partial_rope=partial_rope)


def spec_of(config: Mapping[str, Any], kv_heads: Sequence[int], *, partial_rope: bool = False) -> ModelSpec:
    """Return the spec of a Llama-like configuration whose layers have these numbers of KV heads.

    partial_rope: a part of each head may be rotated. The caller checks the settings that are not read here.
    """
    heads, hidden = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    for count in kv_heads:
        if heads % count:
            raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {count}")
    head_dim = integer(config, "head_dim", max(1, hidden // heads))
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd, and rotary positions need pairs")
    spec = llama_spec(
        vocab_size=integer(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=integer(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=integer(config, "max_position_embeddings"),
        rope=read_rope(config, head_dim if partial_rope else None),
        eps=real(config, "rms_norm_eps", or_zero=True),
        tied_head=flag(config, "tie_word_embeddings", False),
    )
    mlp = DenseSpec(integer(config, "intermediate_size"), activation(config))
    return with_mlps(spec, lambda layer: mlp)


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


def llama_layers(spec: ModelSpec) -> Iterator[tuple[AttentionSpec, DenseSpec]]:
    """Yield attention and MLP of each layer of a Llama. Asserts that the model is like a Llama."""
    for layer in spec.layers:
        assert isinstance(layer.attention, AttentionSpec)
        assert isinstance(layer.mlp, DenseSpec)
        yield layer.attention, layer.mlp


def attending(spec: ModelSpec, windows: Sequence[int | None] | None = None, **changes: Any) -> ModelSpec:
    """Return a Llama-like spec with fields of each layer's attention changed. windows: the window of each layer; None keeps
    them."""
    kept = [layer.attention.window for layer in spec.layers]
    layers = tuple(
        replace(layer, attention=replace(attention, window=window, **changes))
        for layer, (attention, _), window in zip(spec.layers, llama_layers(spec), windows or kept, strict=True)
    )
    return replace(spec, layers=layers)


def with_mlps(spec: ModelSpec, mlp_of: Callable[[int], Mlp]) -> ModelSpec:
    """Return the spec with other MLPs. mlp_of: returns the MLP of a layer, by its number."""
    return replace(spec, layers=tuple(replace(layer, mlp=mlp_of(index)) for index, layer in enumerate(spec.layers)))


LLAMA: Final = Family("LlamaForCausalLM", read_llama, NAMES)


def family() -> Family:
    """Return the family."""
    return LLAMA
