"""A decoder in float64 for any `ModelSpec`. It shares no code with the engine, and latent vectors are expanded."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.core.model_spec import AttentionSpec, DenseSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec, NormSpec, RopeSpec
from pdserve.engine.models.weights import DenseWeights, GqaWeights, LayerWeights, MlaWeights, ModelWeights, MoeWeights


def spec_logits(spec: ModelSpec, weights: ModelWeights, ids: list[int]) -> Tensor:
    """Return the logits of every token of a sequence: [tokens, vocab] float64."""
    weights = weights.map(lambda tensor: tensor.double())
    x = weights.embedding[torch.tensor(ids)] * spec.embedding_scale
    for layer, own in zip(spec.layers, weights.layers, strict=True):
        x = x + post(attend(layer, own, norm(x, own.attention_norm, layer.norms)), own.post_attention_norm, layer)
        normed = norm(x, own.mlp_norm, layer.norms)
        branch = mlp(layer.mlp, own.mlp, normed) if isinstance(layer.mlp, DenseSpec) else experts(layer.mlp, own.mlp, normed)
        x = x + post(branch, own.post_mlp_norm, layer)
    return cap(norm(x, weights.norm, spec.norm) @ weights.head.T, spec.softcap)


def norm(x: Tensor, weight: Tensor, spec: NormSpec) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + spec.eps).sqrt() * (weight + spec.offset)


def post(branch: Tensor, weight: Tensor | None, layer: LayerSpec) -> Tensor:
    if not layer.post_norms:
        return branch
    assert weight is not None
    return norm(branch, weight, layer.norms)


def cap(x: Tensor, bound: float | None) -> Tensor:
    return x if bound is None else bound * torch.tanh(x / bound)


def mlp(spec: DenseSpec | MoeSpec, own: DenseWeights, x: Tensor) -> Tensor:
    gate, up = (x @ own.gate_up.T).chunk(2, -1)
    if spec.activation == "silu":
        active = gate / (1 + (-gate).exp())
    else:
        active = gate / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return (active * up) @ own.down.T


def experts(spec: MoeSpec, own: MoeWeights, x: Tensor) -> Tensor:
    scores = x @ own.router.T
    scores = scores.softmax(-1) if spec.score == "softmax" else 1 / (1 + (-scores).exp())
    ranks = scores + own.router_bias if spec.correction_bias else scores
    groups = ranks.unflatten(1, (spec.groups, -1))
    best = groups.amax(-1) if spec.group_score == "best" else groups.sort(-1, descending=True).values[..., :2].sum(-1)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, first(best, spec.top_groups), True)
    ranks = groups.masked_fill(~kept.unsqueeze(-1), -math.inf).flatten(1)
    weights = torch.zeros_like(scores)
    for row, chosen in enumerate(first(ranks, spec.experts_per_token)):
        total = scores[row, chosen].sum() if spec.renormalise else 1.0
        weights[row, chosen] = scores[row, chosen] / total * spec.scale
    result = torch.zeros_like(x)
    for expert in range(spec.experts):
        result += weights[:, expert, None] * mlp(spec, DenseWeights(own.gate_up[expert], own.down[expert]), x)
    if spec.shared:
        share = 1 / (1 + (-(x @ own.shared_gate.T)).exp()) if spec.shared_gate else 1.0
        result += share * mlp(spec, own.shared, x)
    return result


def first(scores: Tensor, count: int) -> Tensor:
    """Return the places of the largest numbers of each row. Of equal numbers the first is larger."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def attend(layer: LayerSpec, own: LayerWeights, x: Tensor) -> Tensor:
    spec, weights = layer.attention, own.attention
    if isinstance(spec, MlaSpec):
        return attend_expanded(spec, weights, x)
    assert isinstance(spec, AttentionSpec)
    assert isinstance(weights, GqaWeights)
    projected = x @ weights.qkv.T
    if spec.bias:
        projected = projected + weights.qkv_bias
    v_width = spec.kv_heads * spec.v_dim
    q, k = (part.unflatten(1, (-1, spec.qk_dim)) for part in projected[:, :-v_width].split(
        [spec.query_width, spec.kv_heads * spec.qk_dim], 1
    ))  # fmt: skip
    v = projected[:, -v_width:].unflatten(1, (-1, spec.v_dim))
    if spec.qk_norm is not None:
        q, k = norm(q, weights.q_norm, spec.qk_norm), norm(k, weights.k_norm, spec.qk_norm)
    q, k = (rotated(part, spec.rope) for part in (q, k))
    scale = 1 / math.sqrt(spec.qk_dim) if spec.scale is None else spec.scale
    k, v = (part.repeat_interleave(spec.heads // spec.kv_heads, 1) for part in (k, v))
    scores = cap(torch.einsum("ihd,jhd->hij", q, k) * scale, spec.softcap)
    behind = torch.arange(len(x)).unsqueeze(1) - torch.arange(len(x))
    seen = (behind >= 0) & (behind < (spec.window or len(x)))
    shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
    result = torch.einsum("hij,jhd->ihd", shares, v).flatten(1) @ weights.out.T
    return result + weights.out_bias if spec.out_bias else result


def attend_expanded(spec: MlaSpec, weights: object, x: Tensor) -> Tensor:
    assert isinstance(weights, MlaWeights)
    source = x if weights.q_a is None else norm(x @ weights.q_a.T, weights.q_a_norm, spec.norm)
    queries = (source @ weights.q.T).unflatten(1, (spec.heads, -1))
    vector, key = (x @ weights.kv_a.T).split([spec.kv_rank, spec.rope_dim], 1)
    vector, key = norm(vector, weights.kv_a_norm, spec.norm), rotated(key.unsqueeze(1), spec.rope)[:, 0]
    future = torch.ones(len(x), len(x)).triu(1).bool()
    results = []
    for head, expansion in enumerate(weights.kv_b.unflatten(0, (spec.heads, -1))):
        plain, turned = queries[:, head].split([spec.nope_dim, spec.rope_dim], 1)
        keys, values = (vector @ expansion.T).split([spec.nope_dim, spec.v_dim], 1)
        scores = plain @ keys.T + rotated(turned.unsqueeze(1), spec.rope)[:, 0] @ key.T
        scores *= 1 / math.sqrt(spec.qk_dim) if spec.scale is None else spec.scale
        results.append(scores.masked_fill(future, -math.inf).softmax(-1) @ values)
    return torch.cat(results, 1) @ weights.out.T


def rotated(heads: Tensor, rope: RopeSpec) -> Tensor:
    """Rotate [tokens, heads, dim]: number i is paired with number i + rope.dim / 2, or numbers 2i and 2i + 1 are a pair."""
    dim = rope.dim or heads.shape[2]
    half, out = dim // 2, heads.clone()
    i = torch.arange(half)
    angles = torch.arange(len(heads), dtype=torch.float64).reshape(-1, 1, 1) * rope.theta ** (-i.double() / half)
    low, high = (2 * i, 2 * i + 1) if rope.neighbours else (i, i + half)
    a, b = heads[..., low], heads[..., high]
    out[..., low] = a * angles.cos() - b * angles.sin()
    out[..., high] = b * angles.cos() + a * angles.sin()
    return out
