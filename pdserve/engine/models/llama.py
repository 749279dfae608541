"""The Llama decoder over a flat ragged batch and a paged KV cache.

A layer is two functions of rows, with attention between them; only attention mixes rows. `Rows` decides how many rows a
call takes, so the model does not deal with batch invariance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.checkpoint.card import ModelCard
from pdserve.engine.attention.api import Attention
from pdserve.engine.layers.linear import Linear, make_linear
from pdserve.engine.layers.rope import rope_table
from pdserve.engine.layers.rows import PROBE_ROWS, Rows, Sample
from pdserve.engine.layers.torch_ops import Ops
from pdserve.engine.models.batch import Batch
from pdserve.engine.models.weights import LayerWeights, LlamaWeights


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts of a decoder that differ between ways to compute it: fast or batch-invariant, by torch or by Triton."""

    rows: Rows
    attention: Attention[Any]
    ops: Ops


class Layer:
    """The functions of rows of one decoder layer. Its input is already normed, and the norm after the layer is part of it."""

    def __init__(self, card: ModelCard, weights: LayerWeights, next_norm: Tensor, ops: Ops) -> None:
        """Lay out the weights. next_norm: the weight of the norm after this layer, which the next layer or the head needs."""
        self._eps = card.rms_norm_eps
        self._ops = ops
        self._mlp_norm = weights.mlp_norm
        self._next_norm = next_norm
        self._qkv = make_linear(weights.qkv)
        self._attention_out = make_linear(weights.attention_out)
        self._gate_up = make_linear(weights.gate_up)
        self._down = make_linear(weights.down)

    def before_attention(self, normed: Tensor) -> tuple[Tensor]:
        """Return q, k and v in one tensor, [rows, (num_heads + 2 * num_kv_heads) * head_dim]. normed: [rows, hidden]."""
        return (self._qkv(normed),)

    def after_attention(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next layer's x and its norm, both [rows, hidden].

        x: [rows, hidden]. attended: [rows, num_heads * head_dim], the result of attention.
        """
        x, normed = self._ops.add_norm(x, self._attention_out(attended), self._mlp_norm, self._eps)
        mlp = self._down(self._ops.silu_and_mul(self._gate_up(normed)))
        return self._ops.add_norm(x, mlp, self._next_norm, self._eps)


class Llama:
    """The Llama decoder in torch: token ids to hidden states, and hidden states to logits."""

    def __init__(self, card: ModelCard, weights: LlamaWeights, backend: Backend, max_positions: int) -> None:
        """Lay out the weights, in new memory where that is faster: the caller should drop `weights` afterwards."""
        self._eps = card.rms_norm_eps
        self._backend = backend
        self._embedding = weights.embedding
        self._first_norm = weights.layers[0].attention_norm
        next_norms = [*(layer.attention_norm for layer in weights.layers[1:]), weights.norm]
        self._layers = [Layer(card, layer, norm, backend.ops) for layer, norm in zip(weights.layers, next_norms, strict=True)]
        self._head: Linear = make_linear(weights.head)
        self._rope = rope_table(card, max_positions, weights.embedding.device)
        backend.rows.settle(self._samples(card))

    def hidden(self, batch: Batch) -> Tensor:
        """Write the KV of the batch's tokens and return the normed output of the last layer: [padded rows, hidden]."""
        return self.forward(batch, self._backend.attention.prepare(batch.spans))

    def forward(self, batch: Batch, prepared: Any) -> Tensor:
        """Do the work of `hidden` with the attention that is already prepared. The batch's spans are not read."""
        rows, attention, ops = self._backend.rows, self._backend.attention, self._backend.ops
        table_rows = self._rope[batch.positions[: batch.tokens]]
        x, normed = rows.apply(self._embed, batch.token_ids)
        for index, layer in enumerate(self._layers):
            (projected,) = rows.apply(layer.before_attention, normed)
            query = ops.rotate_and_write(index, projected[: batch.tokens], table_rows, batch.slots)
            attended = attention.run(prepared, index, query)
            x, normed = rows.apply(layer.after_attention, x, _pad_rows(attended.flatten(1), x.shape[0]))
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocab] float32 of hidden [rows, hidden], which are any rows of the result of `hidden`."""
        padded = _pad_rows(hidden, self._backend.rows.padded(hidden.shape[0]))
        (logits,) = self._backend.rows.apply(self._project, padded)
        return logits[: hidden.shape[0]].float()

    def _samples(self, card: ModelCard) -> Iterator[Sample]:
        """Yield each function of rows once, with inputs. All layers have the shapes of the first."""
        random = torch.Generator().manual_seed(0)
        device, dtype = self._embedding.device, self._embedding.dtype

        def rows(width: int) -> Tensor:
            return torch.randn(PROBE_ROWS, width, generator=random).to(device, dtype)

        layer, hidden = self._layers[0], card.hidden_size
        yield self._embed, (torch.arange(PROBE_ROWS, device=device) % card.vocab_size,)
        yield layer.before_attention, (rows(hidden),)
        yield layer.after_attention, (rows(hidden), rows(card.num_heads * card.head_dim))
        yield self._project, (rows(hidden),)

    def _embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = F.embedding(token_ids, self._embedding)
        return x, self._backend.ops.norm(x, self._first_norm, self._eps)

    def _project(self, hidden: Tensor) -> tuple[Tensor]:
        return (self._head(hidden),)


def _pad_rows(x: Tensor, count: int) -> Tensor:
    return F.pad(x, (0, 0, 0, count - x.shape[0])) if count > x.shape[0] else x
