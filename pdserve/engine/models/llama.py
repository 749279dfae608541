"""The Llama decoder over a flat ragged batch and a paged KV cache.

A layer is two functions of rows (before and after attention) with attention, the only thing that mixes rows,
between them. `Rows` decides how many rows a call takes, so batch invariance is not the model's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pdserve.checkpoint.card import ModelCard
from pdserve.engine.attention.api import Attention
from pdserve.engine.batch import Batch
from pdserve.engine.elementwise import SiluAndMul, rms_norm
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.linear import Linear, make_linear
from pdserve.engine.rope import rope_table, rotate
from pdserve.engine.rows import Rows
from pdserve.engine.weights import LayerWeights, LlamaWeights


@dataclass(frozen=True, slots=True)
class Backend:
    """How things are computed, chosen once: fast, or with bits that do not depend on the batch."""

    rows: Rows
    attention: Attention[Any]
    silu_and_mul: SiluAndMul


class Layer:
    """One decoder layer's functions of rows."""

    def __init__(self, card: ModelCard, weights: LayerWeights, silu_and_mul: SiluAndMul) -> None:
        self._eps = card.rms_norm_eps
        self._heads = (card.num_heads, card.num_kv_heads, card.num_kv_heads)
        self._head_dim = card.head_dim
        self._silu_and_mul = silu_and_mul
        self._attention_norm = weights.attention_norm
        self._mlp_norm = weights.mlp_norm
        self._qkv = make_linear(weights.qkv)
        self._attention_out = make_linear(weights.attention_out)
        self._gate_up = make_linear(weights.gate_up)
        self._down = make_linear(weights.down)

    def before_attention(self, x: Tensor, table_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [rows, hidden]; table_rows: [rows, 2, head_dim]. Returns q, k, v: [rows, heads, head_dim]."""
        projected = self._qkv(rms_norm(x, self._attention_norm, self._eps))
        heads = projected.view(x.shape[0], -1, self._head_dim)
        num_heads, num_kv_heads, _ = self._heads
        rotated = rotate(heads[:, : num_heads + num_kv_heads], table_rows)
        return rotated[:, :num_heads], rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :]

    def after_attention(self, x: Tensor, attended: Tensor) -> tuple[Tensor]:
        """x: [rows, hidden]; attended: [rows, num_heads * head_dim]. Returns the next layer's x."""
        x = x + self._attention_out(attended)
        gate_up = self._gate_up(rms_norm(x, self._mlp_norm, self._eps))
        return (x + self._down(self._silu_and_mul(gate_up)),)


class Llama:
    def __init__(self, card: ModelCard, weights: LlamaWeights, kv: KvCache, backend: Backend, max_positions: int) -> None:
        """The weights are laid out anew where that is faster: drop yours afterwards."""
        self._eps = card.rms_norm_eps
        self._kv = kv
        self._backend = backend
        self._embedding = weights.embedding
        self._layers = [Layer(card, layer, backend.silu_and_mul) for layer in weights.layers]
        self._norm = weights.norm
        self._head: Linear = make_linear(weights.head)
        self._rope = rope_table(card, max_positions, weights.embedding.device)

    def hidden(self, batch: Batch) -> Tensor:
        """The last layer's output [padded rows, hidden]; writes the KV of the batch's tokens."""
        rows, attention = self._backend.rows, self._backend.attention
        prepared = attention.prepare(batch.spans)
        table_rows = self._rope[batch.positions]
        x = F.embedding(batch.token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            query, key, value = rows.apply(layer.before_attention, x, table_rows)
            self._write(index, batch, key, value)
            attended = attention.run(prepared, index, query[: batch.tokens].contiguous())
            (x,) = rows.apply(layer.after_attention, x, _pad_rows(attended.flatten(1), x.shape[0]))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [rows, hidden], any rows of `hidden`. Returns [rows, vocab] float32."""
        padded = _pad_rows(hidden, self._backend.rows.padded(hidden.shape[0]))
        (logits,) = self._backend.rows.apply(self._project, padded)
        return logits[: hidden.shape[0]].float()

    def _project(self, hidden: Tensor) -> tuple[Tensor]:
        return (self._head(rms_norm(hidden, self._norm, self._eps)),)

    def _write(self, layer: int, batch: Batch, key: Tensor, value: Tensor) -> None:
        self._kv.write(layer, batch.slots, key[: batch.tokens], value[: batch.tokens])


def _pad_rows(x: Tensor, count: int) -> Tensor:
    return F.pad(x, (0, 0, 0, count - x.shape[0])) if count > x.shape[0] else x
