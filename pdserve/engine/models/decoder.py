"""A decoder in torch, built from a `ModelSpec`, over a flat ragged batch and a paged KV cache.

A layer is two functions of rows, with attention between them; only attention mixes rows. `Rows` decides how many rows a
call takes, so the model does not deal with batch invariance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.model_spec import LayerSpec, ModelSpec, RopeSpec
from pdserve.engine.attention.api import Attention
from pdserve.engine.layers.linear import Linear, scheme_for
from pdserve.engine.layers.rope import rope_table
from pdserve.engine.layers.rows import PROBE_ROWS, Rows, Sample
from pdserve.engine.layers.torch_ops import Ops
from pdserve.engine.models.batch import Batch
from pdserve.engine.models.weights import LayerWeights, ModelWeights

LinearFor = Callable[[Tensor], Linear]
"""Function that lays a weight out."""


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts of a decoder that differ between ways to compute it: fast or batch-invariant, by torch or by Triton.

    attention, ops: one for each KV group.
    """

    rows: Rows
    attention: tuple[Attention[Any], ...]
    ops: tuple[Ops, ...]


class NextNorm(NamedTuple):
    """The norm after a layer: the first one of the next layer, or the one before the head."""

    weight: Tensor
    eps: float


class Layer:
    """The functions of rows of one decoder layer. Its input is already normed, and the norm after the layer is part of it."""

    def __init__(self, spec: LayerSpec, weights: LayerWeights, next_norm: NextNorm, ops: Ops, linear: LinearFor) -> None:
        """Lay out the weights."""
        self._eps = spec.norms.eps
        self._ops = ops
        self._mlp_norm = weights.mlp_norm
        self._next_norm = next_norm
        self._qkv = linear(weights.qkv)
        self._attention_out = linear(weights.attention_out)
        self._gate_up = linear(weights.gate_up)
        self._down = linear(weights.down)

    def before_attention(self, normed: Tensor) -> tuple[Tensor]:
        """Return q, k and v in one tensor, [rows, query_width + kv_width]. normed: [rows, hidden]."""
        return (self._qkv(normed),)

    def after_attention(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next layer's x and its norm, both [rows, hidden].

        x: [rows, hidden]. attended: [rows, out_width], the result of attention.
        """
        x, normed = self._ops.add_norm(x, self._attention_out(attended), self._mlp_norm, self._eps)
        mlp = self._down(self._ops.silu_and_mul(self._gate_up(normed)))
        return self._ops.add_norm(x, mlp, *self._next_norm)


class Place(NamedTuple):
    """A layer with the number of its KV group, its place within the group, and the number of its table of rotations."""

    layer: Layer
    group: int
    at: int
    rope: int


class Decoder:
    """A decoder in torch: token ids to hidden states, and hidden states to logits."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, backend: Backend, max_positions: int) -> None:
        """Lay out the weights, in new memory where that is faster: the caller should drop `weights` afterwards.

        Asserts that the caller asked `obstacle`.
        """
        assert obstacle(spec) is None
        self._spec = spec
        self._backend = backend
        self._embedding = weights.embedding
        self._first_norm = NextNorm(weights.layers[0].attention_norm, spec.layers[0].norms.eps)
        linear = partial(Linear, scheme_for(weights.embedding.device, weights.embedding.dtype))
        ropes = {_rope_key(layer): None for layer in spec.layers}
        self._tables = [rope_table(*key, max_positions, weights.embedding.device) for key in ropes]
        numbers = {key: number for number, key in enumerate(ropes)}
        self._layers = [
            Place(Layer(one, own, norm, backend.ops[place[0]], linear), *place, numbers[_rope_key(one)])
            for one, own, norm, place in zip(spec.layers, weights.layers, _next_norms(spec, weights), spec.places, strict=True)
        ]
        self._head = linear(weights.head)
        backend.rows.settle(self._samples())

    def hidden(self, batch: Batch) -> Tensor:
        """Write the KV of the batch's tokens and return the normed output of the last layer: [padded rows, hidden]."""
        prepared = [one.prepare(spans) for one, spans in zip(self._backend.attention, batch.spans, strict=True)]
        return self.forward(batch, prepared)

    def forward(self, batch: Batch, prepared: Sequence[Any]) -> Tensor:
        """Do the work of `hidden` with the attention of each KV group already prepared. The batch's spans are not read."""
        rows, attention, ops = self._backend.rows, self._backend.attention, self._backend.ops
        table_rows = [table[batch.positions[: batch.tokens]] for table in self._tables]
        x, normed = rows.apply(self._embed, batch.token_ids)
        for layer, group, at, rope in self._layers:
            (projected,) = rows.apply(layer.before_attention, normed)
            query = ops[group].rotate_and_write(at, projected[: batch.tokens], table_rows[rope], batch.slots[group])
            attended = attention[group].run(prepared[group], at, query)
            x, normed = rows.apply(layer.after_attention, x, _pad_rows(attended.flatten(1), x.shape[0]))
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocab] float32 of hidden [rows, hidden], which are any rows of the result of `hidden`."""
        padded = _pad_rows(hidden, self._backend.rows.padded(hidden.shape[0]))
        (logits,) = self._backend.rows.apply(self._project, padded)
        return logits[: hidden.shape[0]].float()

    def _samples(self) -> Iterator[Sample]:
        """Yield each function of rows once, with inputs. Layers of equal specs have equal shapes, so the first one stands for
        all of them."""
        random = torch.Generator().manual_seed(0)
        device, dtype = self._embedding.device, self._embedding.dtype

        def rows(width: int) -> Tensor:
            return torch.randn(PROBE_ROWS, width, generator=random).to(device, dtype)

        hidden, seen = self._spec.hidden_size, set[LayerSpec]()
        yield self._embed, (torch.arange(PROBE_ROWS, device=device) % self._spec.vocab_size,)
        for spec, place in zip(self._spec.layers, self._layers, strict=True):
            if spec not in seen:
                yield place.layer.before_attention, (rows(hidden),)
                yield place.layer.after_attention, (rows(hidden), rows(spec.attention.out_width))
                seen.add(spec)
        yield self._project, (rows(hidden),)

    def _embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        x = F.embedding(token_ids, self._embedding)
        return x, self._backend.ops[0].norm(x, *self._first_norm)

    def _project(self, hidden: Tensor) -> tuple[Tensor]:
        return (self._head(hidden),)


def obstacle(spec: ModelSpec) -> str | None:
    """Return the name of something in the model that no decoder in torch computes; None when all of it is computed."""
    return spec.beyond()


def _next_norms(spec: ModelSpec, weights: ModelWeights) -> list[NextNorm]:
    """Return the norm after each layer."""
    firsts = [NextNorm(own.attention_norm, one.norms.eps) for one, own in zip(spec.layers[1:], weights.layers[1:], strict=True)]
    return [*firsts, NextNorm(weights.norm, spec.norm.eps)]


def _rope_key(layer: LayerSpec) -> tuple[RopeSpec, int]:
    return layer.attention.rope, layer.attention.qk_dim


def _pad_rows(x: Tensor, count: int) -> Tensor:
    return F.pad(x, (0, 0, 0, count - x.shape[0])) if count > x.shape[0] else x
