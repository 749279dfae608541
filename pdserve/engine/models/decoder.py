"""A decoder in torch, built from a `ModelSpec`, over a flat ragged batch and a paged KV cache.

A layer is two functions of rows, with attention between them; only attention mixes rows. `Rows` decides how many rows a
call takes, so the model does not deal with batch invariance. Products gather their columns from all ranks of a gang
(`layers/ranks.py`), so a function of rows does not deal with ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.core.model_spec import DenseSpec, LayerSpec, MlaSpec, ModelSpec
from pdserve.core.worker import LayerCounts
from pdserve.engine.attention.api import Attention, Scores
from pdserve.engine.layers.elementwise import Softcap
from pdserve.engine.layers.gqa import GqaPart
from pdserve.engine.layers.latent import LatentPart
from pdserve.engine.layers.linear import Linear, LinearFor, scheme_for
from pdserve.engine.layers.mlp import DenseMlp
from pdserve.engine.layers.moe import MoeMlp
from pdserve.engine.layers.parts import AttentionPart, MlpPart
from pdserve.engine.layers.ranks import Ranks, linear_for
from pdserve.engine.layers.rope import rope_key, rope_table
from pdserve.engine.layers.rows import PROBE_ROWS, Rows, Sample
from pdserve.engine.layers.torch_ops import Ops
from pdserve.engine.models.batch import Batch
from pdserve.engine.models.weights import DenseWeights, GqaWeights, LayerWeights, MlaWeights, MoeWeights, WeightSource
from pdserve.engine.norms import Norm

FEATURES: Final = frozenset({
    "latent attention", "a v_dim other than qk_dim", "window", "bias", "out_bias", "qk_norm", "softcap", "scale",
    "rope of a part of a head", "gelu_tanh", "a mixture of experts", "post_norms", "an offset of norms", "embedding_scale",
    "a softcap of logits",
})  # fmt: skip
"""The names of `ModelSpec.features` that a decoder in torch computes."""
UNEQUAL_SCORES: Final = "layers that share KV of one shape but have different scales or softcaps"


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts of a decoder that differ between ways to compute it: fast or batch-invariant, by torch or by Triton.

    attention, ops: one for each KV group; attention is None where a rank computes no head of the group. softcap: bounds logits.
    name: what computes attention and operations. skipped: the layers of each KV group that lie before those of the rank's
    memory; empty: none do.
    """

    rows: Rows
    attention: tuple[Attention[Any] | None, ...]
    ops: tuple[Ops, ...]
    softcap: Softcap
    name: str = "torch"
    skipped: tuple[int, ...] = ()


class Layer:
    """The functions of rows of one decoder layer. Its input is already normed, and the norm after the layer is part of it."""

    def __init__(
        self, spec: LayerSpec, weights: LayerWeights, next_norm: Norm, ops: Ops, linear: LinearFor, rows: Rows, ranks: Ranks
    ) -> None:
        """Lay out the weights."""
        self.attention = _attention_part(spec, weights, ops, linear, ranks.share.whole_heads(spec.attention))
        each = self.attention.attended_width // spec.attention.kv_heads
        heads = [one.whole_heads(spec.attention) for one in ranks.share.of_stage]
        self.attended = [range(own.start * each, own.stop * each) for own in heads]
        """The columns of attention's result that each rank of the stage computes."""
        self.mlp = _mlp_part(spec, weights, ops, linear, rows, ranks)
        self._ops = ops
        self._mlp_norm = Norm.of(spec.norms, weights.mlp_norm)
        self._next_norm = next_norm
        self._post_norms: tuple[Norm | None, Norm | None] = (None, None)
        if spec.post_norms:
            assert weights.post_attention_norm is not None
            assert weights.post_mlp_norm is not None
            self._post_norms = Norm.of(spec.norms, weights.post_attention_norm), Norm.of(spec.norms, weights.post_mlp_norm)

    def before_attention(self, normed: Tensor) -> tuple[Tensor, ...]:
        """Return what `AttentionPart.write` takes. normed: [rows, hidden]."""
        return self.attention.before(normed)

    def after_attention(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next layer's x and its norm, both [rows, hidden]. The layer has no mixture of experts.

        x: [rows, hidden]. attended: [rows, width], the result of attention.
        """
        assert not isinstance(self.mlp, MoeMlp)
        x, normed = self.add_attention(x, attended)
        return self.add_mlp(x, self.mlp(normed))

    def add_attention(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Return x with the result of attention added, and its norm, which the MLP takes."""
        return self._ops.add_norm(x, self.attention.after(attended), *self._mlp_norm, self._post_norms[0])

    def add_mlp(self, x: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
        """Return x with the result of the MLP added, and the norm after the layer."""
        return self._ops.add_norm(x, branch, *self._next_norm, self._post_norms[1])

    def finish(self, rows: Rows, x: Tensor, attended: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Do the work of `after_attention` for all rows of a batch.

        A mixture of experts gathers rows of the whole batch, so it stands between two functions of rows.
        """
        if not isinstance(self.mlp, MoeMlp):
            return _two(rows.apply(self.after_attention, x, attended))
        x, normed = rows.apply(self.add_attention, x, attended)
        return _two(rows.apply(self.add_mlp, x, self.mlp(normed, batch.tokens, batch.real)))

    def samples(self, make: Callable[[int], Tensor], hidden: int) -> Iterator[Sample]:
        """Yield each function of rows of the layer once, with inputs. make: returns random rows of a width."""
        yield self.before_attention, (make(hidden),)
        attended = make(self.attention.attended_width)
        if not isinstance(self.mlp, MoeMlp):
            yield self.after_attention, (make(hidden), attended)
            return
        yield self.add_attention, (make(hidden), attended)
        yield self.add_mlp, (make(hidden), make(hidden))
        yield from self.mlp.samples(make(hidden))


def _two(results: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    first, second = results
    return first, second


def _attention_part(spec: LayerSpec, weights: LayerWeights, ops: Ops, linear: LinearFor, heads: range) -> AttentionPart:
    if isinstance(spec.attention, MlaSpec):
        assert isinstance(weights.attention, MlaWeights)
        return LatentPart(spec.attention, weights.attention, ops, linear)
    assert isinstance(weights.attention, GqaWeights)
    return GqaPart(spec.attention, weights.attention, ops, linear, heads)


def _mlp_part(
    spec: LayerSpec, weights: LayerWeights, ops: Ops, linear: LinearFor, rows: Rows, ranks: Ranks
) -> MlpPart | MoeMlp:
    mlp, own = spec.mlp, weights.mlp
    if isinstance(mlp, DenseSpec):
        assert isinstance(own, DenseWeights)
        return DenseMlp(mlp, own, ops, linear)
    assert isinstance(own, MoeWeights)
    one, share, shared, by_expert = DenseSpec(mlp.intermediate, mlp.activation), ranks.share, None, None

    def gather(columns: Tensor, width: int) -> Tensor:
        return ranks.gather(columns, [one.columns_of(width) for one in share.of_stage])

    grouped, experts = ops.grouped(mlp, own.gate_up, own.down, share, gather), []
    if grouped is None:
        held, of_expert = share.experts(mlp), linear
        if share.degrees.experts:
            by_expert, of_expert = ranks, partial(Linear, scheme_for(own.down.device, own.down.dtype))
        pairs = zip(own.gate_up[held.start : held.stop], own.down[held.start : held.stop], strict=True)
        experts = [DenseMlp(one, DenseWeights(*pair), ops, of_expert) for pair in pairs]
    if own.shared is not None:
        shared = DenseMlp(DenseSpec(mlp.shared, mlp.activation), own.shared, ops, linear)
    router = own.router if own.shared_gate is None else torch.cat((own.router, own.shared_gate))
    return MoeMlp(mlp, router, own.router_bias, experts, shared, rows, grouped, by_expert)


class LayerPlace(NamedTuple):
    """A layer with the number of its KV group, its place in the group's memory, and the number of its table of rotations."""

    layer: Layer
    group: int
    at: int
    rope: int


class Decoder:
    """A decoder in torch: token ids to hidden states, and hidden states to logits. Of a gang, it is the share of one rank."""

    def __init__(self, ranks: Ranks, weights: WeightSource, backend: Backend, max_positions: int) -> None:
        """Lay out the weights, in new memory where that is faster: the caller should drop `weights` afterwards.

        Asserts that the caller asked `obstacle`. The ranks of a gang meet here, once each has laid its weights out. Raises
        `ConfigError` when the columns of a product have other bits alone.
        """
        spec, share = ranks.share.spec, ranks.share
        assert obstacle(spec) is None
        self._spec = spec
        self._ranks = ranks
        self._backend = backend
        device, self._dtype = weights.embedding.device, weights.embedding.dtype
        self._embedding = weights.embedding
        self._embedded = [one.columns_of(spec.hidden_size) for one in share.of_stage]
        if share.degrees.ranks > 1:
            own = self._embedded[share.rank] if share.stage == 0 else range(0)
            self._embedding = weights.embedding[:, own.start : own.stop].contiguous()
        self._first_norm = Norm.of(spec.layers[0].norms, weights.attention_norm(0))
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self._dtype).item()
        linear = linear_for(scheme_for(device, self._dtype), ranks)
        layers = [spec.layers[number] for number in share.layers]
        ropes = {rope_key(layer.attention): None for layer in layers}
        self._tables = [rope_table(*key, max_positions, device) for key in ropes]
        numbers = {key: number for number, key in enumerate(ropes)}
        self._layers = []
        for number, layer in zip(share.layers, layers, strict=True):
            group, at = spec.places[number]
            if backend.skipped:
                at -= backend.skipped[group]
            made = Layer(
                layer, weights.layers[number], _norm_after(spec, weights, number), backend.ops[group], linear, backend.rows,
                ranks,
            )  # fmt: skip
            self._layers.append(LayerPlace(made, group, at, numbers[rope_key(layer.attention)]))
        self._last = share.layers.stop == len(spec.layers)
        self._head = linear(weights.head) if self._last else None
        backend.rows.settle(self._samples())

    @property
    def recordable(self) -> bool:
        """True when no layer waits for the device, or for other ranks, in a step."""
        return self._ranks.share.degrees.ranks == 1 and all(
            place.layer.mlp.recordable for place in self._layers if isinstance(place.layer.mlp, MoeMlp)
        )

    def hidden(self, batch: Batch) -> Tensor:
        """Write the KV of the batch's tokens and return the normed output of the last layer: [padded rows, hidden].

        Ranks of earlier stages return no more than the shape.
        """
        groups = self._backend.attention
        prepared = [
            [None if one is None else one.prepare(spans) for one, spans in zip(groups, turn.spans, strict=True)]
            for turn in batch.turns
        ]
        return self.forward(batch, prepared)

    def forward(self, batch: Batch, prepared: Sequence[Sequence[Any]]) -> Tensor:
        """Do the work of `hidden` with the attention of each turn and KV group already prepared. Spans are not read."""
        share, rows = self._ranks.share, self._backend.rows
        if share.stage == 0:
            x, normed = rows.apply(self._embed, batch.token_ids)
        else:
            empty = self._embedding.new_empty(2, len(batch.token_ids), self._spec.hidden_size)
            x, normed = empty.unbind()
        for stage in range(share.degrees.pipeline):
            if stage == share.stage:
                x, normed = self._compute_layers(x, normed, batch, prepared)
            if stage + 1 < share.degrees.pipeline:
                x, normed = self._ranks.carry(x, stage), self._ranks.carry(normed, stage)
        return normed

    def _compute_layers(
        self, x: Tensor, normed: Tensor, batch: Batch, prepared: Sequence[Sequence[Any]]
    ) -> tuple[Tensor, Tensor]:
        rows = self._backend.rows
        table_rows = [table[batch.positions[: batch.tokens]] for table in self._tables]
        for place in self._layers:
            layer = place.layer
            projected = tuple(one[: batch.tokens] for one in rows.apply(layer.before_attention, normed))
            own = self._attend(place, projected, table_rows[place.rope], batch, prepared)
            attended = self._ranks.gather(own, layer.attended)
            x, normed = layer.finish(rows, x, _pad_rows(attended, x.shape[0]), batch)
        return x, normed

    def _attend(
        self,
        place: LayerPlace,
        projected: tuple[Tensor, ...],
        table_rows: Tensor,
        batch: Batch,
        prepared: Sequence[Sequence[Any]],
    ) -> Tensor:
        """Write the KV of a layer and return its attention [tokens, width], turn by turn."""
        layer, group, at, _ = place
        attention = self._backend.attention[group]
        if attention is None:
            return projected[0].new_empty(batch.tokens, 0)
        parts: list[Tensor] = []
        for turn, ready in zip(batch.turns, prepared, strict=True):
            own, own_table = projected, table_rows
            if turn.rows is not None:
                own, own_table = tuple(one[turn.rows] for one in projected), table_rows[turn.rows]
            query = layer.attention.write(at, own, own_table, turn.slots[group])
            if turn.kept is not None:
                turn.kept.keep(group, at)
            parts.append(attention.run(ready[group], at, query).flatten(1))
        if len(parts) == 1:
            return parts[0]
        attended = parts[0].new_empty(batch.tokens, parts[0].shape[1])
        for turn, part in zip(batch.turns, parts, strict=True):
            assert turn.rows is not None
            attended[turn.rows] = part
        return attended

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocab] float32 of hidden [rows, hidden], which are any rows of the result of `hidden`."""
        count, last_stage = hidden.shape[0], self._ranks.share.degrees.pipeline - 1
        if not self._last:
            return self._ranks.carry(hidden.new_empty(count, self._spec.vocab_size, dtype=torch.float32), last_stage)
        padded = _pad_rows(hidden, self._backend.rows.padded(count))
        (logits,) = self._backend.rows.apply(self._project, padded)
        wide = logits[:count].float()
        capped = wide if self._spec.softcap is None else self._backend.softcap(wide, self._spec.softcap)
        return self._ranks.carry(capped, last_stage)

    def expert_counts(self) -> list[LayerCounts]:
        """Return the tokens that chose each expert so far, of each layer that has experts."""
        mlps = [(number, place.layer.mlp) for number, place in enumerate(self._layers)]
        return [(number, mlp.counts.tolist()) for number, mlp in mlps if isinstance(mlp, MoeMlp)]

    def _samples(self) -> Iterator[Sample]:
        """Yield each function of rows once, with inputs. Layers of equal specs have equal shapes, so the first layer stands for
        all of them."""
        random = torch.Generator().manual_seed(0)
        device = self._embedding.device

        def rows(width: int) -> Tensor:
            return torch.randn(PROBE_ROWS, width, generator=random).to(device, self._dtype)

        hidden, seen = self._spec.hidden_size, set[LayerSpec]()
        if self._ranks.share.stage == 0:
            yield self._embed, (torch.arange(PROBE_ROWS, device=device) % self._spec.vocab_size,)
        for number, place in zip(self._ranks.share.layers, self._layers, strict=True):
            spec = self._spec.layers[number]
            if spec not in seen:
                yield from place.layer.samples(rows, hidden)
                seen.add(spec)
        if self._last:
            yield self._project, (rows(hidden),)

    def _embed(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        own = F.embedding(token_ids, self._embedding)
        x = self._ranks.gather(own, self._embedded)
        if self._embedding_scale != 1.0:
            x.mul_(self._embedding_scale)
        return x, self._backend.ops[0].norm(x, *self._first_norm)

    def _project(self, hidden: Tensor) -> tuple[Tensor]:
        assert self._head is not None
        return (self._head(hidden),)


def _norm_after(spec: ModelSpec, weights: WeightSource, layer: int) -> Norm:
    """Return the norm after a layer: the first norm of the next layer, or the norm before the head."""
    if layer + 1 == len(spec.layers):
        return Norm.of(spec.norm, weights.norm)
    return Norm.of(spec.layers[layer + 1].norms, weights.attention_norm(layer + 1))


def obstacle(spec: ModelSpec) -> str | None:
    """Return the name of something in the model that no decoder in torch computes; None when all of it is computed."""
    lacking = spec.beyond(FEATURES)
    if lacking is not None:
        return lacking
    for layers in spec.kv_groups:
        if len({Scores.of(spec.layers[layer].attention) for layer in layers}) > 1:
            return UNEQUAL_SCORES
    return None


def _pad_rows(x: Tensor, count: int) -> Tensor:
    return F.pad(x, (0, 0, 0, count - x.shape[0])) if count > x.shape[0] else x
