"""Small models, each with features that Llama lacks, and random weights for all of their parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from pdserve.core.model_spec import AttentionSpec, DenseSpec, LayerSpec, Mlp, ModelSpec, MoeSpec, NormSpec, RopeSpec
from pdserve.engine.models.weights import DenseWeights, GqaWeights, LayerWeights, ModelWeights, MoeWeights

HIDDEN, VOCAB = 64, 160


def model(*attentions: AttentionSpec, mlp: Mlp | None = None, layer: dict[str, Any] | None = None, **more: Any) -> ModelSpec:
    """Return a model with a layer for each attention. layer, more: fields of the layers and of the model."""
    fields = {"norms": NormSpec(1e-6), **(layer or {})}
    layers = tuple(LayerSpec(attention, mlp or DenseSpec(112), **fields) for attention in attentions)
    model = ModelSpec(VOCAB, HIDDEN, layers, fields["norms"], max_position=2048, tied_head=False)
    return replace(model, **more)


def heads(heads: int, kv_heads: int, dim: int, **more: Any) -> AttentionSpec:
    """Return an attention with heads of queries and of keys, each of `dim` numbers."""
    return AttentionSpec(heads, kv_heads, dim, dim, **{"rope": RopeSpec(10000.0), **more})


GEMMA: Final = {"qk_norm": NormSpec(1e-6, 1.0), "scale": 0.2, "softcap": 4.0}
MODELS: Final[dict[str, ModelSpec]] = {
    "qwen2": model(*[heads(4, 2, 16, bias=True)] * 2),
    "qwen3": model(*[heads(6, 2, 32, qk_norm=NormSpec(0.5))] * 2),
    "mistral": model(heads(7, 1, 80, window=7), heads(4, 4, 16, window=1), heads(2, 1, 64, window=300)),
    "wide": model(heads(3, 1, 256, window=512), heads(3, 1, 256, window=1000)),
    "phi": model(*[heads(4, 2, 48, out_bias=True, bias=True, rope=RopeSpec(500.0, dim=20))] * 2),
    "gemma3": model(
        heads(4, 2, 32, window=70, **GEMMA), heads(4, 2, 32, rope=RopeSpec(1e6), **GEMMA),
        mlp=DenseSpec(112, "gelu_tanh"), layer={"norms": NormSpec(1e-6, 1.0), "post_norms": True},
        embedding_scale=8.0, softcap=2.0,
    ),
    "all": model(
        heads(4, 2, 64, window=65, bias=True, out_bias=True, **{**GEMMA, "rope": RopeSpec(500.0, dim=32)}),
        heads(8, 2, 64, out_bias=True, softcap=3.0),
        mlp=DenseSpec(128, "gelu_tanh"), layer={"norms": NormSpec(1e-6, 0.5), "post_norms": True},
        embedding_scale=4.0, softcap=2.0,
    ),
}  # fmt: skip
"""Each name says which family has these features. The widths of "all" are multiples of 64, for weights of fewer bits."""
MIXTURES: Final = {
    "mixtral": model(*[heads(4, 2, 16)] * 2, mlp=MoeSpec(8, 2, 48)),
    "qwen2_moe": model(
        *[heads(4, 2, 16, bias=True)] * 2, mlp=MoeSpec(12, 2, 32, renormalise=False, shared=80, shared_gate=True)
    ),
    "deepseek2": model(
        *[heads(4, 4, 16)] * 2, mlp=MoeSpec(20, 6, 16, renormalise=False, scale=3.0, groups=4, top_groups=2, shared=32)
    ),
    "deepseek3": model(
        *[heads(4, 4, 16)] * 2,
        mlp=MoeSpec(
            32, 5, 32, score="sigmoid", scale=2.5, correction_bias=True, groups=8, top_groups=3, group_score="best_two",
            shared=16,
        ),
    ),
    "ties": model(
        *[heads(4, 2, 64, window=70)] * 2, mlp=MoeSpec(8, 3, 64, shared=64, activation="gelu_tanh"),
        layer={"norms": NormSpec(1e-6), "post_norms": True},
    ),
}  # fmt: skip
"""Mixtures of experts. In "ties" each two experts have equal scores, and the choice ends between two."""
MODELS |= MIXTURES


def weights_of(spec: ModelSpec) -> ModelWeights:
    """Return random weights in bfloat16's numbers. They keep activations near 1, and spread scores enough to matter."""
    generator = torch.Generator().manual_seed(5)

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16().float()

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return random(rows, columns, scale=scale / columns**0.5)

    def norm(size: int, offset: float) -> Tensor:
        return (0.5 + torch.rand(size, generator=generator) - offset).bfloat16().float()

    def dense(width: int) -> DenseWeights:
        return DenseWeights(matrix(2 * width, HIDDEN), matrix(HIDDEN, width))

    def mixture(one: MoeSpec) -> MoeWeights:
        router, parts = (
            matrix(one.experts, HIDDEN, 3.0 if one.score == "softmax" else 1.0),
            [dense(one.intermediate) for _ in range(one.experts)],
        )
        if spec is MODELS["ties"]:
            router = router[::2].repeat_interleave(2, 0)
        return MoeWeights(
            router=router,
            gate_up=torch.stack([part.gate_up for part in parts]),
            down=torch.stack([part.down for part in parts]),
            router_bias=random(one.experts, scale=0.2) if one.correction_bias else None,
            shared=dense(one.shared) if one.shared else None,
            shared_gate=matrix(1, HIDDEN) if one.shared_gate else None,
        )

    def layer(one: LayerSpec) -> LayerWeights:
        attention, offset = one.attention, one.norms.offset
        assert isinstance(attention, AttentionSpec)
        width, of_heads = attention.query_width + attention.kv_width, attention.qk_norm
        return LayerWeights(
            attention_norm=norm(HIDDEN, offset),
            attention=GqaWeights(
                qkv=matrix(width, HIDDEN, 1.5),
                out=matrix(HIDDEN, attention.out_width),
                qkv_bias=random(width) if attention.bias else None,
                out_bias=random(HIDDEN) if attention.out_bias else None,
                q_norm=None if of_heads is None else 1.5 * norm(attention.qk_dim, of_heads.offset),
                k_norm=None if of_heads is None else 1.5 * norm(attention.qk_dim, of_heads.offset),
            ),
            mlp_norm=norm(HIDDEN, offset),
            mlp=dense(one.mlp.intermediate) if isinstance(one.mlp, DenseSpec) else mixture(one.mlp),
            post_attention_norm=norm(HIDDEN, offset) if one.post_norms else None,
            post_mlp_norm=norm(HIDDEN, offset) if one.post_norms else None,
        )

    layers = tuple(map(layer, spec.layers))
    embedding = random(VOCAB, HIDDEN, scale=1 / spec.embedding_scale)
    return ModelWeights(embedding, layers, norm(HIDDEN, spec.norm.offset), matrix(VOCAB, HIDDEN))
