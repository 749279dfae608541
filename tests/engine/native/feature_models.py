"""Small models, each with features that Llama lacks, and random weights for all of their parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor

from pdserve.core.model_spec import (
    Attention,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    MlaSpec,
    Mlp,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
)
from pdserve.engine.models.weights import DenseWeights, GqaWeights, LayerWeights, MlaWeights, ModelWeights, MoeWeights

HIDDEN, VOCAB = 64, 160


def model(*attentions: Attention, mlp: Mlp | None = None, layer: dict[str, Any] | None = None, **more: Any) -> ModelSpec:
    """Return a model with a layer for each attention. layer, more: fields of the layers and of the model."""
    fields = {"norms": NormSpec(1e-6), **(layer or {})}
    layers = tuple(LayerSpec(attention, mlp or DenseSpec(112), **fields) for attention in attentions)
    model = ModelSpec(VOCAB, HIDDEN, layers, fields["norms"], max_position=2048, tied_head=False)
    return replace(model, **more)


def heads(heads: int, kv_heads: int, dim: int, **more: Any) -> AttentionSpec:
    """Return an attention with heads of queries and of keys, each of `dim` numbers."""
    return AttentionSpec(heads, kv_heads, dim, dim, **{"rope": RopeSpec(10000.0), **more})


def latent(heads: int, kv_rank: int, nope_dim: int, rope_dim: int, v_dim: int, **more: Any) -> MlaSpec:
    """Return a latent attention whose eps and neighbours show when they are not used."""
    rope = RopeSpec(500.0, neighbours=True)
    return MlaSpec(heads, kv_rank, nope_dim, rope_dim, v_dim, **{"rope": rope, "norm": NormSpec(0.3), "scale": 0.3, **more})


GEMMA: Final = {"qk_norm": NormSpec(1e-6, 1.0), "scale": 0.2, "softcap": 4.0}
# The scale makes scores as mild as elsewhere: codes of four bits then differ from those of torch as little as in other models.
MIXED: Final = [  # heads, kv_heads, head_dim, intermediate, theta, eps: three KV groups, whose layers are mixed
    (4, 2, 32, 192, 10000.0, 1e-5),
    (2, 1, 64, 320, 500.0, 1e-2),
    (4, 2, 32, 64, 500.0, 1e-3),
    (8, 4, 16, 128, 10000.0, 1e-5),
    (2, 1, 64, 64, 10000.0, 1e-5),
]
MODELS: Final[dict[str, ModelSpec]] = {
    "mixed": ModelSpec(
        VOCAB, HIDDEN,
        tuple(
            LayerSpec(heads(count, kv_heads, dim, rope=RopeSpec(theta), scale=0.4 * dim**-0.5), DenseSpec(width), NormSpec(eps))
            for count, kv_heads, dim, width, theta, eps in MIXED
        ),
        NormSpec(1e-4), max_position=2048, tied_head=False,
    ),
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
"""Each name says which family has these features. The widths of "all" and "mixed" are multiples of 64, for weights of
fewer bits. The layers of "mixed" differ in everything that Llama's may differ in."""
LATENTS: Final = {
    "latent": model(*[latent(5, 48, 32, 16, 16)] * 2),
    "latent_ranked": model(*[latent(3, 80, 16, 32, 48, q_rank=112, scale=None, rope=RopeSpec(500.0))] * 2),
    "latent_wide": model(latent(9, 512, 128, 64, 128, q_rank=64, scale=0.08)),
    "latent_many": model(latent(130, 16, 16, 16, 16), heads(4, 2, 16)),
    "latent_all": model(*[latent(4, 64, 48, 32, 32, q_rank=128)] * 2, mlp=DenseSpec(128)),
}  # fmt: skip
"""Latent attention, with the widths of DeepSeek-V3 in "latent_wide". The widths of "latent_all" allow weights of fewer bits."""
MIXTURES: Final[dict[str, ModelSpec]] = {
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
    "latent_moe": model(
        *[latent(4, 32, 16, 16, 32)] * 2,
        mlp=MoeSpec(
            32, 5, 64, score="sigmoid", scale=2.5, correction_bias=True, groups=8, top_groups=3, group_score="best_two",
            shared=64,
        ),
    ),
    "ties": model(
        *[heads(4, 2, 64, window=70)] * 2, mlp=MoeSpec(8, 3, 64, shared=64, activation="gelu_tanh"),
        layer={"norms": NormSpec(1e-6), "post_norms": True},
    ),
}  # fmt: skip
"""Mixtures of experts. In "ties" each two experts have equal scores, and the choice ends between two."""
MODELS |= {**LATENTS, **MIXTURES}


def weights_of(spec: ModelSpec) -> ModelWeights:
    """Return random weights in bfloat16's numbers. They keep activations near 1, and spread scores enough to matter."""
    generator = torch.Generator().manual_seed(5)
    hidden = spec.hidden_size

    def random(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16().float()

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        return random(rows, columns, scale=scale / columns**0.5)

    def norm(size: int, offset: float) -> Tensor:
        return (0.5 + torch.rand(size, generator=generator) - offset).bfloat16().float()

    def dense(width: int) -> DenseWeights:
        return DenseWeights(matrix(2 * width, hidden), matrix(hidden, width))

    def mixture(one: MoeSpec) -> MoeWeights:
        router, parts = (
            matrix(one.experts, hidden, 3.0 if one.score == "softmax" else 1.0),
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
            shared_gate=matrix(1, hidden) if one.shared_gate else None,
        )

    def grouped(spec: AttentionSpec) -> GqaWeights:
        width, of_heads = spec.query_width + spec.kv_width, spec.qk_norm
        return GqaWeights(
            qkv=matrix(width, hidden, 1.5),
            out=matrix(hidden, spec.out_width),
            qkv_bias=random(width) if spec.bias else None,
            out_bias=random(hidden) if spec.out_bias else None,
            q_norm=None if of_heads is None else 1.5 * norm(spec.qk_dim, of_heads.offset),
            k_norm=None if of_heads is None else 1.5 * norm(spec.qk_dim, of_heads.offset),
        )

    def shared_vectors(spec: MlaSpec) -> MlaWeights:
        return MlaWeights(
            q=matrix(spec.query_width, spec.q_rank or hidden),
            kv_a=matrix(spec.kv_rank + spec.rope_dim, hidden),
            kv_a_norm=norm(spec.kv_rank, spec.norm.offset),
            kv_b=matrix(spec.heads * (spec.nope_dim + spec.v_dim), spec.kv_rank, 1.5),
            out=matrix(hidden, spec.out_width),
            q_a=None if spec.q_rank is None else matrix(spec.q_rank, hidden),
            q_a_norm=None if spec.q_rank is None else norm(spec.q_rank, spec.norm.offset),
        )

    def layer(one: LayerSpec) -> LayerWeights:
        attention, offset = one.attention, one.norms.offset
        return LayerWeights(
            attention_norm=norm(hidden, offset),
            attention=shared_vectors(attention) if isinstance(attention, MlaSpec) else grouped(attention),
            mlp_norm=norm(hidden, offset),
            mlp=dense(one.mlp.intermediate) if isinstance(one.mlp, DenseSpec) else mixture(one.mlp),
            post_attention_norm=norm(hidden, offset) if one.post_norms else None,
            post_mlp_norm=norm(hidden, offset) if one.post_norms else None,
        )

    layers = tuple(map(layer, spec.layers))
    embedding = random(VOCAB, hidden, scale=1 / spec.embedding_scale)
    return ModelWeights(embedding, layers, norm(hidden, spec.norm.offset), matrix(VOCAB, hidden))
