"""The parts of a layer that a checkpoint stores, with their shapes. Matrices are [out_features, in_features]. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.core.model_spec import AttentionSpec, LayerSpec, MlaSpec, MoeSpec

Part = tuple[str, int | None]
"""The name of a part, and the number of the expert that it belongs to. None: it belongs to no expert."""


def layer_shapes(layer: LayerSpec, hidden: int) -> Iterator[tuple[Part, tuple[int, ...]]]:
    """Yield each part of a layer with its shape. Parts that one tensor may hold together follow each other."""
    yield ("attention_norm", None), (hidden,)
    attention = layer.attention
    found = _mla(attention, hidden) if isinstance(attention, MlaSpec) else _gqa(attention, hidden)
    yield from (((name, None), shape) for name, shape in found)
    yield ("attention_out", None), (hidden, attention.out_width)
    if layer.post_norms:
        yield ("post_attention_norm", None), (hidden,)
    yield ("mlp_norm", None), (hidden,)
    if isinstance(layer.mlp, MoeSpec):
        yield from _moe(layer.mlp, hidden)
    else:
        yield from _gated("", layer.mlp.intermediate, hidden)
    if layer.post_norms:
        yield ("post_mlp_norm", None), (hidden,)


def _gqa(attention: AttentionSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    (k_heads, k_dim), (v_heads, v_dim) = attention.planes
    widths = {"q": attention.query_width, "k": k_heads * k_dim, "v": v_heads * v_dim}
    yield from ((name, (width, hidden)) for name, width in widths.items())
    if attention.bias:
        yield from ((f"{name}_bias", (width,)) for name, width in widths.items())
    if attention.qk_norm is not None:
        yield "q_norm", (attention.qk_dim,)
        yield "k_norm", (attention.qk_dim,)
    if attention.out_bias:
        yield "attention_out_bias", (hidden,)


def _mla(attention: MlaSpec, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if attention.q_rank is None:
        yield "q", (attention.query_width, hidden)
    else:
        yield "q_a", (attention.q_rank, hidden)
        yield "q_a_norm", (attention.q_rank,)
        yield "q_b", (attention.query_width, attention.q_rank)
    yield "kv_a", (attention.kv_rank + attention.rope_dim, hidden)
    yield "kv_a_norm", (attention.kv_rank,)
    yield "kv_b", (attention.heads * (attention.nope_dim + attention.v_dim), attention.kv_rank)


def _moe(mlp: MoeSpec, hidden: int) -> Iterator[tuple[Part, tuple[int, ...]]]:
    yield ("router", None), (mlp.experts, hidden)
    if mlp.correction_bias:
        yield ("router_bias", None), (mlp.experts,)
    for expert in range(mlp.experts):
        yield from _gated("expert_", mlp.intermediate, hidden, expert)
    if mlp.shared:
        yield from _gated("shared_", mlp.shared, hidden)
    if mlp.shared_gate:
        yield ("shared_expert_gate", None), (1, hidden)


def _gated(prefix: str, width: int, hidden: int, expert: int | None = None) -> Iterator[tuple[Part, tuple[int, ...]]]:
    yield (f"{prefix}gate", expert), (width, hidden)
    yield (f"{prefix}up", expert), (width, hidden)
    yield (f"{prefix}down", expert), (hidden, width)
