"""Small random models of any `ModelSpec`. Every number is random: biases, norms and all."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB, EngineConfig
from pdserve.core.model_spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from pdserve.engine.models.weights import DenseWeights, GqaWeights, LayerWeights, ModelWeights
from pdserve.engine.runner import ModelRunner

VOCAB, HIDDEN = 96, 48
PLAIN = AttentionSpec(4, 2, 16, 16, RopeSpec(100.0))
LAYER = LayerSpec(PLAIN, DenseSpec(40), NormSpec(1e-5))


def model(*layers: LayerSpec, **changes: object) -> ModelSpec:
    """A model of these layers. Its norm before the head is of their kind."""
    return replace(ModelSpec(VOCAB, HIDDEN, layers, layers[0].norms, 4096, tied_head=False), **changes)


def attention(**changes: object) -> LayerSpec:
    return replace(LAYER, attention=replace(PLAIN, **changes))


GEMMA = replace(LAYER, mlp=DenseSpec(40, "gelu_tanh"), norms=NormSpec(1e-6, 1.0), post_norms=True)
GEMMA_HEADS = replace(PLAIN, qk_norm=NormSpec(1e-6, 1.0), scale=0.2, softcap=4.0)
MODELS = {
    "plain": model(LAYER, LAYER),
    "a v_dim other than qk_dim": model(attention(v_dim=24), attention(v_dim=24)),
    "window": model(attention(window=7), attention(window=7)),
    "bias": model(attention(bias=True)),
    "out_bias": model(attention(out_bias=True)),
    "qk_norm": model(attention(qk_norm=NormSpec(1e-6))),
    "softcap": model(attention(softcap=0.5)),
    "scale": model(attention(scale=0.6)),
    "rope of a part of a head": model(attention(rope=RopeSpec(100.0, dim=6))),
    "gelu_tanh": model(replace(LAYER, mlp=DenseSpec(40, "gelu_tanh"))),
    "post_norms": model(replace(LAYER, post_norms=True)),
    "an offset of norms": model(replace(LAYER, norms=NormSpec(1e-5, 1.0))),
    "embedding_scale": model(LAYER, embedding_scale=6.9),
    "a softcap of logits": model(LAYER, softcap=3.0),
    "gemma": model(
        replace(GEMMA, attention=replace(GEMMA_HEADS, window=21)),
        replace(GEMMA, attention=replace(GEMMA_HEADS, rope=RopeSpec(1000.0))),
        replace(GEMMA, attention=replace(GEMMA_HEADS, window=21)),
        embedding_scale=6.9, softcap=3.0,
    ),
}  # fmt: skip
"""One model for each feature that a Llama lacks, by the name of the feature; a Llama, and one with most features."""


def random_weights(spec: ModelSpec, dtype: torch.dtype) -> ModelWeights:
    """Weights that keep activations near 1 and spread scores enough to matter."""
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int, size: float = 1.0) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * size / columns**0.5).to(dtype)

    def vector(length: int, middle: float = 0.0) -> Tensor:
        return (torch.randn(length, generator=generator) * 0.3 + middle).to(dtype)

    def layer(one: LayerSpec) -> LayerWeights:
        heads, mlp, middle = one.attention, one.mlp, 1.0 - one.norms.offset
        assert isinstance(heads, AttentionSpec)
        assert isinstance(mlp, DenseSpec)
        head_middle = 1.0 - heads.qk_norm.offset if heads.qk_norm else 0.0
        return LayerWeights(
            attention_norm=vector(HIDDEN, middle),
            attention=GqaWeights(
                qkv=matrix(heads.query_width + heads.kv_width, HIDDEN, 1.5),
                out=matrix(HIDDEN, heads.out_width),
                qkv_bias=vector(heads.query_width + heads.kv_width) if heads.bias else None,
                out_bias=vector(HIDDEN) if heads.out_bias else None,
                q_norm=vector(heads.qk_dim, head_middle) if heads.qk_norm else None,
                k_norm=vector(heads.qk_dim, head_middle) if heads.qk_norm else None,
            ),
            mlp_norm=vector(HIDDEN, middle),
            mlp=DenseWeights(matrix(2 * mlp.intermediate, HIDDEN, 1.5), matrix(HIDDEN, mlp.intermediate)),
            post_attention_norm=vector(HIDDEN, middle) if one.post_norms else None,
            post_mlp_norm=vector(HIDDEN, middle) if one.post_norms else None,
        )

    layers = tuple(layer(one) for one in spec.layers)
    norm = vector(HIDDEN, 1.0 - spec.norm.offset)
    return ModelWeights(matrix(VOCAB, HIDDEN, HIDDEN**0.5), layers, norm, matrix(VOCAB, HIDDEN, 2.0))


def make(spec: ModelSpec, tiny: ModelCard, **settings: object) -> ModelRunner:
    """A runner with the random weights. tiny: any card, whose names are not used."""
    config = EngineConfig(**{"kv_cache_memory": 8 * MIB, "dtype": "float32", **settings})  # type: ignore[arg-type]
    return ModelRunner.make(replace(tiny, spec=spec), config, lambda dtype, _: random_weights(spec, dtype))
