"""The sizes of a decoder, as far as its operations and its memory traffic depend on them.

A `ModelSpec` says exactly what an engine computes. A `ModelShape` says less, so it can also describe models that no engine here
computes. Norms and biases are left out: they are less than a thousandth of the numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pdserve.core.kv_layout import KvGroup
from pdserve.core.model_spec import Attention, MlaSpec, Mlp, ModelSpec, MoeSpec


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention of one layer. `gqa_attention` and `mla_attention` make it."""

    numbers: int
    """The numbers in the matrices of its projections."""
    kv_numbers: int
    """The numbers of KV that the layer stores for each token."""
    pair_flops: int
    """The operations of one query of a prompt and one key that it attends to, all heads together."""
    decode_pair_flops: int
    """The same operations for a query that decodes. They differ for MLA, because its decode steps attend to latent vectors."""
    window: int | None = None
    """The most tokens that a token attends to, itself included. None: there is no limit."""


@dataclass(frozen=True, slots=True)
class MlpShape:
    """The MLP of one layer, or its mixture of experts."""

    numbers: int
    """The numbers in the matrices that every token passes: a dense MLP, or the router and the shared experts."""
    expert_numbers: int = 0
    """The numbers of one routed expert."""
    experts: int = 0
    experts_per_token: int = 0


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer."""

    attention: AttentionShape
    mlp: MlpShape

    @property
    def numbers(self) -> int:
        """The numbers in all matrices of the layer, with all experts."""
        return self.attention.numbers + self.mlp.numbers + self.mlp.experts * self.mlp.expert_numbers

    @property
    def active_numbers(self) -> int:
        """The numbers by which one token is multiplied."""
        return self.attention.numbers + self.mlp.numbers + self.mlp.experts_per_token * self.mlp.expert_numbers


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole decoder: layers of each shape with their number, and the embedding. A tied head is the embedding itself."""

    vocab_size: int
    hidden_size: int
    layers: tuple[tuple[LayerShape, int], ...]
    tied_head: bool

    @classmethod
    def of(cls, spec: ModelSpec) -> ModelShape:
        """Return the shape of a model that an engine computes."""
        hidden = spec.hidden_size
        counts = Counter(LayerShape(_attention(layer.attention, hidden), _mlp(layer.mlp, hidden)) for layer in spec.layers)
        return cls(spec.vocab_size, hidden, tuple(counts.items()), spec.tied_head)

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return sum(count for _, count in self.layers)

    @property
    def layer_numbers(self) -> int:
        """The numbers in the matrices of all layers."""
        return sum(layer.numbers * count for layer, count in self.layers)

    @property
    def active_layer_numbers(self) -> int:
        """The numbers in the matrices of all layers by which one token is multiplied."""
        return sum(layer.active_numbers * count for layer, count in self.layers)

    @property
    def head_numbers(self) -> int:
        """The numbers of the head. A step reads the whole head. If the embedding is not tied to it, the step also reads one row
        of the embedding for each token."""
        return self.vocab_size * self.hidden_size

    @property
    def numbers(self) -> int:
        """The numbers in all matrices, with embedding and head. A tied head is counted once."""
        return self.layer_numbers + (1 if self.tied_head else 2) * self.head_numbers

    @property
    def kv_numbers(self) -> int:
        """The numbers of KV that all layers store for one token."""
        return sum(layer.attention.kv_numbers * count for layer, count in self.layers)

    def kv_numbers_of(self, tokens: int) -> int:
        """Return the numbers of KV of one sequence. A layer with a window needs at most the tokens of its window."""
        return sum(
            layer.attention.kv_numbers * count * min(tokens, layer.attention.window or tokens) for layer, count in self.layers
        )

    def held_numbers(self, sequences: int, tokens: int, *, step_tokens: int, block_size: int) -> int:
        """Return the most numbers of KV that this many sequences of `tokens` tokens hold while they run together.

        A layer with a window holds the blocks that its engine reserves (`KvGroup.most_useful`): whole blocks of each window,
        and the blocks of a step of `step_tokens`.
        """
        numbers = 0
        for layer, count in self.layers:
            group = KvGroup((0,), ((1, 2),), block_size, "float32", layer.attention.window)  # only its window matters
            most = group.most_useful(sequences, step_tokens)
            held = sequences * tokens if most is None else min(sequences * tokens, most * block_size)
            numbers += layer.attention.kv_numbers * count * held
        return numbers


def _attention(spec: Attention, hidden: int) -> AttentionShape:
    if isinstance(spec, MlaSpec):
        return mla_attention(
            hidden,
            spec.heads,
            q_rank=spec.q_rank,
            kv_rank=spec.kv_rank,
            nope_dim=spec.nope_dim,
            rope_dim=spec.rope_dim,
            v_dim=spec.v_dim,
        )
    return gqa_attention(hidden, spec.heads, spec.kv_heads, spec.qk_dim, spec.v_dim, window=spec.window)


def _mlp(spec: Mlp, hidden: int) -> MlpShape:
    if isinstance(spec, MoeSpec):
        return moe_mlp(
            hidden,
            spec.intermediate,
            experts=spec.experts,
            experts_per_token=spec.experts_per_token,
            shared=spec.shared,
            shared_gate=spec.shared_gate,
        )
    return dense_mlp(hidden, spec.intermediate)


def gqa_attention(
    hidden: int, heads: int, kv_heads: int, qk_dim: int, v_dim: int, *, window: int | None = None
) -> AttentionShape:
    """Return attention in which `heads` query heads share `kv_heads` heads of K and V. Equal numbers: MHA. One KV head: MQA."""
    kv_numbers = kv_heads * (qk_dim + v_dim)
    pair_flops = 2 * heads * (qk_dim + v_dim)
    return AttentionShape(
        hidden * (heads * qk_dim + kv_numbers + heads * v_dim), kv_numbers, pair_flops, pair_flops, window=window
    )


def mla_attention(
    hidden: int, heads: int, *, q_rank: int | None, kv_rank: int, nope_dim: int, rope_dim: int, v_dim: int
) -> AttentionShape:
    """Return multi-head latent attention (DeepSeek-V2, section 2.1). q_rank None: queries are projected in one product.

    A token stores one latent vector and one rotated key. A prompt expands them to all heads. A decode step multiplies the
    expansion into the query and the output, so its queries attend to the latent vectors themselves.
    """
    q_dim, stored = nope_dim + rope_dim, kv_rank + rope_dim
    queries = hidden * heads * q_dim if q_rank is None else q_rank * (hidden + heads * q_dim)
    numbers = queries + hidden * stored + kv_rank * heads * (nope_dim + v_dim) + heads * v_dim * hidden
    return AttentionShape(numbers, stored, 2 * heads * (q_dim + v_dim), 2 * heads * (stored + kv_rank))


def dense_mlp(hidden: int, intermediate: int, *, gated: bool = True) -> MlpShape:
    """Return an MLP of `intermediate` numbers. A gated MLP has three matrices, an ungated MLP has two."""
    return MlpShape((3 if gated else 2) * hidden * intermediate)


def moe_mlp(
    hidden: int, intermediate: int, *, experts: int, experts_per_token: int, shared: int = 0, shared_gate: bool = False
) -> MlpShape:
    """Return a mixture of gated experts of `intermediate` numbers each. shared: the numbers of a gated MLP for every token.

    shared_gate: one more product of the token weighs the result of the shared MLP.
    """
    every = hidden * (experts + 3 * shared + shared_gate)
    return MlpShape(every, 3 * hidden * intermediate, experts, experts_per_token)
