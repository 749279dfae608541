"""Latent attention in float64 as its definition says it: keys and values of all heads are expanded, nothing is absorbed."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.core.model_spec import DenseSpec, LayerSpec, MlaSpec, ModelSpec, NormSpec, RopeSpec
from pdserve.engine.models.weights import DenseWeights, LayerWeights, MlaWeights, ModelWeights

VOCAB, HIDDEN = 60, 32
ROPE = RopeSpec(theta=100.0, neighbours=True)
LATENT = MlaSpec(
    heads=3, kv_rank=16, nope_dim=6, rope_dim=8, v_dim=10, rope=ROPE, norm=NormSpec(0.01), q_rank=12, scale=0.37
)  # fmt: skip
"""An eps and a scale that show when they are not used."""


def random_weights(spec: MlaSpec, seed: int = 1) -> MlaWeights:
    """Weights with norms that are not 1, and scores that are not all alike."""
    random = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) / columns**0.5

    def norm(width: int) -> Tensor:
        return torch.rand(width, generator=random) + 0.5

    return MlaWeights(
        q=matrix(spec.query_width, spec.q_rank or HIDDEN),
        kv_a=matrix(spec.kv_rank + spec.rope_dim, HIDDEN),
        kv_a_norm=norm(spec.kv_rank),
        kv_b=matrix(spec.heads * (spec.nope_dim + spec.v_dim), spec.kv_rank),
        out=matrix(HIDDEN, spec.out_width),
        q_a=None if spec.q_rank is None else matrix(spec.q_rank, HIDDEN),
        q_a_norm=None if spec.q_rank is None else norm(spec.q_rank),
    )


def latent_spec(attention: MlaSpec, layers: int = 2) -> ModelSpec:
    """A decoder with dense MLPs."""
    layer = LayerSpec(attention, DenseSpec(48), NormSpec(1e-5))
    return ModelSpec(VOCAB, HIDDEN, (layer,) * layers, NormSpec(1e-5), 512, tied_head=False)


def latent_model(attention: MlaSpec = LATENT) -> tuple[ModelSpec, ModelWeights]:
    """A decoder, and random weights of it in float32."""
    random, spec = torch.Generator().manual_seed(7), latent_spec(attention)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random) / (shape[-1] ** 0.5 if len(shape) > 1 else 5) + (len(shape) == 1)

    made = tuple(
        LayerWeights(
            drawn(HIDDEN), random_weights(attention, seed), drawn(HIDDEN), DenseWeights(drawn(96, HIDDEN), drawn(HIDDEN, 48))
        )
        for seed in range(len(spec.layers))
    )
    return spec, ModelWeights(drawn(VOCAB, HIDDEN) * 4, made, drawn(HIDDEN), drawn(VOCAB, HIDDEN))


def expanded(spec: MlaSpec, weights: MlaWeights, x: Tensor) -> Tensor:
    """Return the attention [tokens, hidden] of x [tokens, hidden] float64, the tokens of one sequence from position 0."""
    w = {name: None if (one := getattr(weights, name)) is None else one.double() for name in weights.__slots__}
    source = x if w["q_a"] is None else normed(x @ w["q_a"].T, w["q_a_norm"], spec.norm)
    query = (source @ w["q"].T).unflatten(1, (spec.heads, spec.qk_dim))
    stored = x @ w["kv_a"].T
    latent = normed(stored[:, : spec.kv_rank], w["kv_a_norm"], spec.norm)
    shared = turned(stored[:, spec.kv_rank :], spec.rope)
    both = (latent @ w["kv_b"].T).unflatten(1, (spec.heads, -1))
    scale = spec.qk_dim**-0.5 if spec.scale is None else spec.scale
    future = torch.ones(len(x), len(x)).triu(1).bool()
    out = []
    for head in range(spec.heads):
        key = torch.cat((both[:, head, : spec.nope_dim], shared), 1)
        own = torch.cat((query[:, head, : spec.nope_dim], turned(query[:, head, spec.nope_dim :], spec.rope)), 1)
        scores = (own @ key.T * scale).masked_fill(future, -torch.inf)
        out.append(scores.softmax(-1) @ both[:, head, spec.nope_dim :])
    return torch.cat(out, 1) @ w["out"].T


def turned(x: Tensor, rope: RopeSpec) -> Tensor:
    """Rotate x [tokens, dim]: numbers 2i and 2i + 1 are a pair, or i and i + dim / 2."""
    out, half = x.clone(), x.shape[1] // 2
    positions = torch.arange(len(x), dtype=torch.float64)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if rope.neighbours else (i, i + half)
        angle = positions * rope.theta ** (-i / half)
        out[:, a] = x[:, a] * angle.cos() - x[:, b] * angle.sin()
        out[:, b] = x[:, b] * angle.cos() + x[:, a] * angle.sin()
    return out


def normed(x: Tensor, weight: Tensor, spec: NormSpec) -> Tensor:
    """Return the RMSNorm of the rows of x."""
    return x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt() * weight.double()


def expanded_logits(spec: ModelSpec, weights: ModelWeights, ids: list[int]) -> Tensor:
    """Return the logits [tokens, vocab] float64 of one sequence."""
    x = weights.embedding.double()[ids]
    for layer, own in zip(spec.layers, weights.layers, strict=True):
        x = x + expanded(layer.attention, own.attention, normed(x, own.attention_norm, layer.norms))
        gate, up = (normed(x, own.mlp_norm, layer.norms) @ own.mlp.gate_up.double().T).chunk(2, -1)
        x = x + (torch.nn.functional.silu(gate) * up) @ own.mlp.down.double().T
    return normed(x, weights.norm, spec.norm) @ weights.head.double().T
