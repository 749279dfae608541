"""A decoder in compiled code, built from a `ModelSpec`. One call computes all layers of a step.

It computes in bfloat16, on CPUs that have the instructions. Every product and every reduction has one order, which depends
only on the sequence. So it is batch-invariant at no cost, except with quantised KV, where the rounding of a block depends on
how its tokens were cut into steps. Activations between layers stay float32. The operands of products are rounded to
bfloat16, or to 8 bits (weights with a scale for each column, activations with a scale for each 64 of a row). Weights of 4
bits are multiplied with activations in bfloat16.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, chain, repeat
from operator import itemgetter
from typing import Final

import numpy as np
import torch
from torch import Tensor

from pdserve.core.errors import InternalBug, OutOfThreads, ReplicaLost
from pdserve.core.ids import BlockId
from pdserve.core.model_spec import Attention, AttentionSpec, DenseSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec, NormSpec
from pdserve.core.sampling import TokenLogprobs
from pdserve.core.shards import RankShare
from pdserve.core.step_plan import NO_TOKEN, Sampled, SampleSpec, StepPlan
from pdserve.core.worker import LayerCounts
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.layers.latent import expansion, in_halves
from pdserve.engine.layers.linear import ABSORB, EXPAND, HEAD, ROUTER, CompiledScheme
from pdserve.engine.layers.rope import rope_key, rope_table
from pdserve.engine.models.api import Logits
from pdserve.engine.models.weights import DenseWeights, GqaWeights, LayerWeights, MlaWeights, MoeWeights, WeightSource
from pdserve.engine.native import library
from pdserve.engine.native.library import ROW_BYTES, ROW_DRAW, ROW_MORE

# Rows that are sampled in compiled code -------------------------------------------------------------------------------
#
# The arguments and results of compiled sampling, for each row that is not plainly greedy.


_Part = tuple[int, ...]
_NO_BIAS: _Part = (0, 0, 0)
_NO_SEEN: _Part = (0, 0, 0)
_NO_BANS: _Part = (0, 0)
_NO_LOGPROBS: _Part = (0, 0, 0)


class PackedRows:
    """The `PdRow` structures of one call. This object keeps all memory alive that they point to."""

    def __init__(self, rows: list[int], specs: list[SampleSpec], vocab_size: int) -> None:
        """Pack one structure for each row. specs[i] says how to draw a token from row rows[i] of the logits, which has
        `vocab_size` numbers."""
        self._mask_bytes = 2 * -(-vocab_size // 16)  # compiled code reads 16 bits at once
        self._rows = bytearray(ROW_BYTES * len(rows))
        self._ids = array("i", bytes(4 * len(rows)))
        self._kept: list[object] = []
        self._wanted: list[tuple[int, array[float], array[int]]] = []
        for i, (row, spec) in enumerate(zip(rows, specs, strict=True)):
            params = spec.params
            ROW_DRAW.pack_into(
                self._rows, i * ROW_BYTES, row, params.top_k, params.temperature, params.top_p, params.min_p, params.seed,
                spec.output_index,
            )  # fmt: skip
            if spec.edits is not None or spec.banned_ids or params.logprobs is not None or spec.grammar is not None:
                self._pack_more(i, spec)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._rows))
        self.ids_address = self._ids.buffer_info()[0]

    def taken(self) -> list[Sampled]:
        """Return the token of each row, in order. Call it after the compiled call has returned."""
        taken: list[Sampled] = list(zip(self._ids, repeat(None)))
        for i, logprobs, top_ids in self._wanted:
            if self._ids[i] == NO_TOKEN:
                continue
            taken[i] = (self._ids[i], TokenLogprobs(logprobs[0], tuple(zip(top_ids, logprobs[1:], strict=True))))
        return taken

    def _pack_more(self, i: int, spec: SampleSpec) -> None:
        params, edits = spec.params, spec.edits
        bias, seen = _NO_BIAS, _NO_SEEN
        if edits is not None:
            bias = (edits.bias_ids.buffer_info()[0], *edits.bias.buffer_info())
            seen = (edits.seen_ids.buffer_info()[0], *edits.output_counts.buffer_info())
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        banned, logprobs = self._banned(spec), self._logprobs(i, params.logprobs)
        ROW_MORE.pack_into(
            self._rows, i * ROW_BYTES + ROW_DRAW.size, *bias, *seen, *penalties, *banned, *logprobs, self._mask(spec)
        )

    def _banned(self, spec: SampleSpec) -> _Part:
        if not spec.banned_ids:
            return _NO_BANS
        banned = array("i", spec.banned_ids)
        self._kept.append(banned)
        return banned.buffer_info()

    def _mask(self, spec: SampleSpec) -> int:
        """Return the address of the mask of the spec's grammar, or 0. A grammar that has failed allows no token."""
        if spec.grammar is None:
            return 0
        mask = spec.grammar.mask()
        bits = np.frombuffer(bytes(self._mask_bytes) if mask is None else mask, np.uint8)
        assert len(bits) >= self._mask_bytes
        self._kept.append(bits)
        return int(bits.__array_interface__["data"][0])  # a fifth of the time of `bits.ctypes.data`

    def _logprobs(self, i: int, tops: int | None) -> _Part:
        if tops is None:
            return _NO_LOGPROBS
        logprobs, top_ids = array("f", bytes(4 * (1 + tops))), array("i", bytes(4 * tops))
        self._wanted.append((i, logprobs, top_ids))
        return (logprobs.buffer_info()[0], *top_ids.buffer_info())


# The decoder -----------------------------------------------------------------------------------------------------

LANES: Final = 16  # floats in a vector; gate and up alternate in groups of this many columns
MOST_HEAD_DIM: Final = 640
KV_FORMATS: Final = {"bfloat16": 0, "float32": 1, "int8": 2, "fp8_e4m3": 3, "int4": 4}  # the numbers equal those in abi.h
SHARED_HEADS: Final = "several ranks read one head of quantised KV, which the rows of drafts change one after the other"
UNEQUAL_LATENTS: Final = "layers that share KV of one shape but have latent vectors of different sizes"
NEEDS: Final = "bfloat16 on a CPU with AVX2 and FMA, and a C++ compiler when pdserve was installed"
COMPUTED: Final = frozenset({
    "window", "bias", "out_bias", "qk_norm", "softcap", "scale", "rope of a part of a head", "gelu_tanh", "post_norms",
    "an offset of norms", "embedding_scale", "a softcap of logits", "a mixture of experts", "latent attention",
})  # fmt: skip
"""The features beyond Llama's that the compiled code computes, by the names of `ModelSpec.features`."""
_ACTIVATIONS: Final = ("silu", "gelu_tanh")  # the places are the numbers of abi.h
_QKV, _ATTENTION_OUT, _GATE_UP, _DOWN = range(HEAD)
_BEFORE_ATTENTION, _BEFORE_MLP, _BEFORE_HEAD, _AFTER_ATTENTION, _AFTER_MLP, _OF_QUERIES, _OF_KEYS = range(7)
_QKV_BIAS, _OUT_BIAS, _ROUTER_BIAS = range(7, 10)
_EXPERT_GATE_UP, _EXPERT_DOWN, _QUERY_UP = range(ROUTER + 1, ABSORB)

Tables = tuple[tuple[tuple[BlockId, ...], ...], ...]
"""The block tables of all KV groups of each slice."""


def obstacle(spec: ModelSpec, kv: KvPool) -> str | None:
    """Return the reason, in words, why the compiled code does not run this model here; None when it runs."""
    if kv.device.type != "cpu":
        return "compiled steps are for CPUs"
    if kv.dtype is not torch.bfloat16:
        return "compiled steps are for bfloat16"
    unknown = next((group.dtype for group in kv.spec.groups if group.dtype not in KV_FORMATS), None)
    if unknown is not None:
        return f"compiled steps do not store KV in {unknown}"
    lacking = spec.beyond(COMPUTED)
    if lacking is not None:
        return f"compiled steps do not compute {lacking}"
    ranks = ({_latent_shape(spec.layers[layer].attention).kv_rank for layer in layers} for layers in spec.kv_groups)
    if any(len(of_group) > 1 for of_group in ranks):
        return f"compiled steps do not compute {UNEQUAL_LATENTS}"
    if any(width % LANES for width in _widths(spec, _head_widths)):
        return f"compiled steps need widths that are multiples of {LANES}"
    if any(dim > MOST_HEAD_DIM for layer in spec.layers for _, dim in layer.attention.planes):
        return f"compiled steps need heads of at most {MOST_HEAD_DIM}"
    return None if library.load() is not None else library.find().why


def supports(spec: ModelSpec, kv: KvPool) -> bool:
    """Tell whether the compiled code runs this model here.

    It needs bfloat16 on a CPU and widths of whole vectors. The dtype of KV may be any.
    """
    return obstacle(spec, kv) is None


class NativeDecoder:
    """The compiled decoder as the runner's `Model`.

    It copies the weights into the layout of the kernels, except the embedding: one layer at a time, so that a source which
    reads the weights on demand never holds all of them.
    """

    computes_in_torch = False
    way = "compiled"

    def __init__(
        self,
        share: RankShare,
        weights: WeightSource,
        kv: KvPool,
        max_positions: int,
        scheme: CompiledScheme,
        gang: library.NativeGang | None = None,
    ) -> None:
        """Copy the weights of a share, which is that of one rank of `gang`; without a gang it is the whole model.

        Raises `ConfigError` when a width does not allow the scheme, MemoryError without memory.
        """
        spec = share.spec
        scheme.check(_widths(spec, _product_widths))
        loaded = library.load()
        assert loaded is not None, "the caller asked `supports`"
        self._library = loaded
        self.isa: str = loaded.pdserve_isa().decode()
        self.scheme = scheme
        self.threads = torch.get_num_threads()
        self._block_size = kv.spec.block_size
        shared = kv.spec.quantised and any(share.shares_kv(layer.attention) for layer in spec.layers)
        self.drafts_obstacle = SHARED_HEADS if shared else None
        """The reason, in words, why steps cannot take drafts; None when they can."""
        self._groups = (library.NativeGroup * len(kv.caches))(
            *(library.NativeGroup(0, 0, one.address, one.num_blocks, KV_FORMATS[one.layout.dtype]) for one in kv.caches)
        )
        self._groups_address = ctypes.addressof(self._groups)
        self._vocab = spec.vocab_size
        self._share, self._gang = share, gang
        own_layers = [spec.layers[layer] for layer in share.layers]
        mlps = enumerate(layer.mlp for layer in own_layers)
        self._mixtures = [(number, mlp.experts) for number, mlp in mlps if isinstance(mlp, MoeSpec)]
        self._room = self._logits = self._no_values = torch.empty(0, spec.vocab_size)
        self._logits_address = self._rows = 0
        ids = share.token_ids
        embedding = weights.embedding
        self._embedding = (embedding if len(ids) == spec.vocab_size else embedding[ids.start : ids.stop].clone()).contiguous()
        ropes = {rope_key(one.attention) for one in own_layers}
        self._ropes = {key: rope_table(*key, max_positions, kv.device) for key in ropes}
        count = len(own_layers)
        self._layers = count
        places = [spec.places[layer] for layer in share.layers]
        layers = (library.NativeLayer * count)(*map(self._layer_shape, own_layers, places))
        windows = array("q", (group.window or 0 for group in kv.spec.groups))
        group_layers = array("q", (group.num_layers for group in kv.spec.groups))
        shape = library.NativeShape(
            spec.hidden_size, spec.vocab_size, count, len(kv.caches), layers, windows.buffer_info()[0],
            group_layers.buffer_info()[0], ids.start, len(ids), None if gang is None else ctypes.pointer(gang), spec.norm.eps,
            float(torch.tensor(spec.embedding_scale).bfloat16()), spec.softcap or 0.0,
            share.parts, share.columns.start, len(share.columns),
        )  # fmt: skip
        self._model = loaded.pdserve_model_new(ctypes.byref(shape), self._embedding.data_ptr())
        if self._model is None:
            raise MemoryError
        weakref.finalize(self, loaded.pdserve_model_free, self._model)
        for index, layer in enumerate(share.layers):
            self._take_layer(index, spec.layers[layer], weights.layers[layer])
        if share.layers.stop == len(spec.layers):
            self._take_vector(0, _BEFORE_HEAD, weights.norm, spec.norm.offset)
            self._take(0, HEAD, weights.head[ids.start : ids.stop])

    def forward(self, plan: StepPlan, rows: list[int], *, best_alone: bool = False) -> Logits:
        """Compute the plan, write its KV, and return the logits of `rows`. With `best_alone` they are never in memory.

        The plan is turned into one array for each field, so that the loops over sequences run in C. Torch is called only
        where it is needed: a call takes 10 to 90 us when the step before has emptied the CPU's caches. Raises MemoryError,
        `OutOfThreads` or `InternalBug`.
        """
        _, starts, token_ids, block_tables, _, packed = zip(*plan.slices, strict=True)
        tokens = array("i", chain.from_iterable(token_ids))
        tables = [_GroupTables(group, block_tables, packed) for group in range(len(self._groups))]
        for group, own in zip(self._groups, tables, strict=True):
            group.span_table, group.tables = own.begins.buffer_info()[0], own.ids.buffer_info()[0]
        best = array("i", bytes(4 * len(rows)))
        if len(rows) != self._rows and not best_alone:
            self._make_room(len(rows))
        first, lengths, wanted = array("i", starts), array("i", map(len, token_ids)), array("i", rows)
        drafted = array("i", bytes(4 * plan.decodes))
        if plan.decodes < len(starts):
            drafted.extend([1 if piece.drafts else 0 for piece in plan.slices[plan.decodes :]])
        step = library.Step(
            self.threads, self._layers, len(tokens), len(starts), len(rows), tokens.buffer_info()[0], first.buffer_info()[0],
            lengths.buffer_info()[0], drafted.buffer_info()[0], wanted.buffer_info()[0], self._groups_address, self._block_size,
            0 if best_alone else self._logits_address, best.buffer_info()[0],
        )  # fmt: skip
        _done(self._library.pdserve_model_forward(self._model, ctypes.byref(step)))
        if best_alone:
            return Logits(self._no_values, best.tolist())
        return Logits(self._logits, best.tolist(), partial(self._sample, self._logits))

    def settle_drafts(self, counts: list[int]) -> None:
        """Take back what rejected drafts changed in quantised blocks, as `Model.settle_drafts` says. Raises `ReplicaLost`."""
        held = array("i", counts)
        _done(self._library.pdserve_model_settle(self._model, held.buffer_info()[0]))

    def follow(self) -> None:
        """Compute the steps of rank 0, until the gang is lost. Raises `ReplicaLost` then, MemoryError or `OutOfThreads`."""
        _done(self._library.pdserve_model_follow(self._model, self.threads, self._groups))

    @contextmanager
    def first_layer_alone(self) -> Iterator[None]:
        """Compute only the first layer and the head in steps inside `with`. They take as much memory as whole steps do, because
        the memory of all layers is taken before the first one is computed. Their logits and their KV mean nothing."""
        all_layers = self._layers
        self.compute_layers(1)
        try:
            yield
        finally:
            self.compute_layers(all_layers)

    def compute_layers(self, count: int) -> None:
        """Compute only so many first layers in the steps from now on, and then the head."""
        self._layers = count

    def expert_counts(self) -> list[LayerCounts]:
        """Return the tokens that chose each expert. The last layer counts only tokens whose logits were wanted."""
        return [(layer, self._counts_of(layer, experts)) for layer, experts in self._mixtures]

    def _counts_of(self, layer: int, experts: int) -> list[int]:
        counts = array("q", bytes(8 * experts))
        self._library.pdserve_model_expert_counts(self._model, layer, counts.buffer_info()[0])
        return counts.tolist()

    def _make_room(self, rows: int) -> None:
        """Make room for logits [rows, vocab]. All steps use the same memory.

        With new memory for each step, the system would clear its pages, which takes 10 % of a step of 64 rows.
        """
        with torch.inference_mode(False):  # so that a step outside of inference mode may change them
            if rows > len(self._room):
                self._room = torch.empty(rows, self._vocab) if self._gang is None else self._shared_room(self._gang, rows)
            self._rows, self._logits = rows, self._room[:rows]
        self._logits_address = self._room.data_ptr()

    def _shared_room(self, gang: library.NativeGang, rows: int) -> Tensor:
        """Return the place where all ranks write their logits. Raises MemoryError for more rows than it has."""
        if rows > gang.rows:
            raise MemoryError
        address = self._library.pdserve_gang_logits(ctypes.byref(gang))
        numbers = (ctypes.c_float * (gang.rows * self._vocab)).from_address(address)
        return torch.frombuffer(numbers, dtype=torch.float32).view(gang.rows, self._vocab)

    def _sample(self, logits: Tensor, rows: list[int], specs: list[SampleSpec]) -> list[Sampled]:
        """Draw a token for each of `rows` in compiled code; see `Samples` of models.api."""
        packed = PackedRows(rows, specs, self._vocab)
        _done(
            self._library.pdserve_model_sample(
                self._model, self.threads, logits.data_ptr(), packed.address, len(rows), packed.ids_address
            )
        )
        return packed.taken()

    def _layer_shape(self, layer: LayerSpec, place: tuple[int, int]) -> library.NativeLayer:
        attention, mlp, share = layer.attention, layer.mlp, self._share
        table = self._ropes[rope_key(attention)]
        kv_heads = share.kv_heads(attention)
        heads = len(share.heads(attention)), len(kv_heads), attention.planes[0][1]
        kv = kv_heads.start, attention.kv_heads, share.stores_kv(attention), share.shares_kv(attention)
        softcap = attention.softcap if isinstance(attention, AttentionSpec) else None
        activation = _ACTIVATIONS.index(mlp.activation)
        moe = library.Moe() if isinstance(mlp, DenseSpec) else _moe_shape(mlp, layer, share)
        intermediate = 0 if moe.experts else len(share.intermediate(layer))
        return library.NativeLayer(
            *heads, intermediate, *place, table.shape[2], activation, *kv, layer.norms.eps, _head_norm(attention).eps,
            _scale_of(attention), softcap or 0.0, table.data_ptr(), _latent_shape(attention), moe,
        )  # fmt: skip

    def _take_layer(self, index: int, spec: LayerSpec, layer: LayerWeights) -> None:
        offset = spec.norms.offset
        self._take_vectors(index, offset, {
            _BEFORE_ATTENTION: layer.attention_norm, _BEFORE_MLP: layer.mlp_norm,
            _AFTER_ATTENTION: layer.post_attention_norm, _AFTER_MLP: layer.post_mlp_norm,
        })  # fmt: skip
        if isinstance(layer.attention, MlaWeights):
            assert isinstance(spec.attention, MlaSpec)
            self._take_latent(index, spec.attention, layer.attention)
        else:
            assert isinstance(spec.attention, AttentionSpec)
            self._take_heads(index, spec.attention, layer.attention)
        if isinstance(layer.mlp, DenseWeights):
            self._take_mlp(index, _GATE_UP, layer.mlp, self._share.intermediate(spec))
        else:
            assert isinstance(spec.mlp, MoeSpec)
            self._take_experts(index, spec, layer.mlp)

    def _take_heads(self, layer: int, spec: AttentionSpec, own: GqaWeights) -> None:
        self._take_vectors(layer, _head_norm(spec).offset, {_OF_QUERIES: own.q_norm, _OF_KEYS: own.k_norm})
        bias = None if own.qkv_bias is None else self._own_rows(spec, own.qkv_bias)
        self._take_vectors(layer, 0.0, {_QKV_BIAS: bias, _OUT_BIAS: own.out_bias})
        self._take(layer, _QKV, self._own_rows(spec, own.qkv))
        self._take_shared(layer, _ATTENTION_OUT, own.out, self._share.part_of(spec.out_width))

    def _own_rows(self, spec: AttentionSpec, qkv: Tensor) -> Tensor:
        """Return the rows of queries, keys and values that this rank computes."""
        share, queries, keys, dim = self._share, spec.query_width, spec.query_width + spec.kv_heads * spec.qk_dim, spec.qk_dim
        if len(share.heads(spec)) == spec.heads:
            return qkv
        heads, kv_heads = share.heads(spec), share.kv_heads(spec) if share.stores_kv(spec) else range(0)
        each = ((0, heads, dim), (queries, kv_heads, dim), (keys, kv_heads, spec.v_dim))
        return torch.cat([qkv[first + of.start * width : first + of.stop * width] for first, of, width in each])

    def _take_latent(self, layer: int, spec: MlaSpec, own: MlaWeights) -> None:
        self._take_vectors(layer, spec.norm.offset, {_OF_QUERIES: own.q_a_norm, _OF_KEYS: own.kv_a_norm})
        q, kv_a = in_halves(spec, own)
        heads = self._share.heads(spec)
        q = q[heads.start * spec.qk_dim : heads.stop * spec.qk_dim]
        self._take(layer, _QKV, torch.cat((q if own.q_a is None else own.q_a, kv_a)))
        if own.q_a is not None:
            self._take(layer, _QUERY_UP, q)
        keys, values = expansion(spec, own)
        for place, head in enumerate(heads):  # all tensors of one kind first, so that a step reads memory from front to back
            self._take(layer, ABSORB, keys[head].t(), place)
        for place, head in enumerate(heads):
            self._take(layer, EXPAND, values[head], place)
        self._take_shared(layer, _ATTENTION_OUT, own.out, self._share.part_of(spec.out_width))

    def _take_mlp(self, layer: int, which: int, mlp: DenseWeights, numbers: range, expert: int = 0) -> None:
        """Copy these numbers of a gated MLP. which: the number of its gate and up; the next number is that of down."""
        # [2 * width, hidden], gate first, becomes LANES rows of the gate, the same LANES rows of up, and so on.
        hidden = mlp.gate_up.shape[1]
        both = mlp.gate_up.view(2, -1, hidden)[:, numbers.start : numbers.stop]
        gate_up = both.reshape(2, -1, LANES, hidden).transpose(0, 1).reshape(-1, hidden)
        self._take(layer, which, gate_up, expert)
        self._take_shared(layer, which + 1, mlp.down, numbers, expert)

    def _take_experts(self, layer: int, spec: LayerSpec, moe: MoeWeights) -> None:
        assert isinstance(spec.mlp, MoeSpec)
        gate = () if moe.shared_gate is None else (moe.shared_gate,)
        self._take(layer, ROUTER, torch.cat((moe.router, *gate)))
        if moe.router_bias is not None:
            self._take_vector(layer, _ROUTER_BIAS, moe.router_bias, 0.0)
        if moe.shared is not None:
            self._take_mlp(layer, _GATE_UP, moe.shared, self._share.part_of(spec.mlp.shared))
        for expert in self._share.experts(spec.mlp):
            weights = DenseWeights(moe.gate_up[expert], moe.down[expert])
            self._take_mlp(layer, _EXPERT_GATE_UP, weights, self._share.intermediate(spec), expert)

    def _take_shared(self, layer: int, which: int, weight: Tensor, numbers: range, part: int = 0) -> None:
        """Copy these numbers of each row of a weight, or this rank's rows where ranks share no sums."""
        if self._share.gathers:
            columns = self._share.columns
            self._take(layer, which, weight[columns.start : columns.stop], part)
        else:
            self._take(layer, which, weight, part, numbers=numbers)

    def _take(self, layer: int, which: int, weight: Tensor, part: int = 0, *, numbers: range | None = None) -> None:
        """Copy a weight, or these numbers of each of its rows."""
        _done(self.scheme.pack(self._library, self._model, layer, which, weight, part, numbers))

    def _take_vectors(self, layer: int, offset: float, vectors: Mapping[int, Tensor | None]) -> None:
        """Copy the vectors that are there, by their numbers."""
        for which, vector in vectors.items():
            if vector is not None:
                self._take_vector(layer, which, vector, offset)

    def _take_vector(self, layer: int, which: int, vector: Tensor, offset: float) -> None:
        held = (vector.float() + offset).contiguous()
        _done(self._library.pdserve_model_vector(self._model, layer, which, held.data_ptr(), held.numel()))


def split_batches(num_kv_heads: int) -> tuple[int, ...]:
    """Return the smallest and the largest number of decodes whose attention is cut into parts with their own memory.

    `plan` in plan.cpp has the same rule.
    """
    most = (4 * torch.get_num_threads() - 1) // num_kv_heads
    return (1, most) if most > 1 else (1,)


def _moe_shape(moe: MoeSpec, layer: LayerSpec, share: RankShare) -> library.Moe:
    choice = moe.score == "sigmoid", moe.renormalise, moe.groups, moe.top_groups, moe.group_score == "best_two"
    own, shared = share.experts(moe), len(share.part_of(moe.shared))
    return library.Moe(
        moe.experts, moe.experts_per_token, len(share.intermediate(layer)), *choice, shared, moe.shared_gate, own.start,
        len(own), moe.scale,
    )  # fmt: skip


def _latent_shape(attention: Attention) -> library.Latent:
    if not isinstance(attention, MlaSpec):
        return library.Latent()
    return library.Latent(attention.kv_rank, attention.q_rank or 0, attention.nope_dim, attention.v_dim)


def _head_norm(attention: Attention) -> NormSpec:
    """Return the norm of heads or of latent vectors; any where there is none."""
    if isinstance(attention, MlaSpec):
        return attention.norm
    return attention.qk_norm or NormSpec(0.0)


def _scale_of(attention: Attention) -> float:
    """Return the factor of scores. 1 / sqrt(qk_dim) is computed in float32."""
    if attention.scale is not None:
        return attention.scale
    return float(1 / torch.tensor(float(attention.qk_dim)).sqrt())


def _head_widths(attention: Attention) -> set[int]:
    """Return the widths of heads and of latent vectors."""
    if not isinstance(attention, MlaSpec):
        return {attention.qk_dim}
    ranks = {attention.kv_rank, attention.q_rank or attention.kv_rank}
    return {attention.nope_dim, attention.rope_dim, attention.v_dim, *ranks}


def _product_widths(attention: Attention) -> set[int]:
    """Return the widths that are multiplied with weights of any scheme."""
    rank = attention.q_rank if isinstance(attention, MlaSpec) else None
    return {attention.out_width} | ({rank} if rank is not None else set())


def _widths(spec: ModelSpec, of_attention: Callable[[Attention], set[int]]) -> set[int]:
    """Return the width of the model, and the widths of each layer's MLPs and attention."""
    return {
        spec.hidden_size,
        *(layer.mlp.intermediate for layer in spec.layers),
        *(layer.mlp.shared for layer in spec.layers if isinstance(layer.mlp, MoeSpec)),
        *chain.from_iterable(of_attention(layer.attention) for layer in spec.layers),
    }


class _GroupTables:
    """The block tables of a step in one KV group, one after the other. begins: where each starts, and the end of the last."""

    __slots__ = ("begins", "ids")

    def __init__(self, group: int, tables: Tables, packed: tuple[tuple[bytes, ...], ...]) -> None:
        of_group = itemgetter(group)
        own = list(map(of_group, tables))
        parts = map(of_group, packed) if all(packed) else map(_packed, own)
        self.ids = array("i", b"".join(parts))
        self.begins = array("q", accumulate(map(len, own), initial=0))


def _packed(table: tuple[BlockId, ...]) -> bytes:
    return array("i", table).tobytes()


def _done(result: int) -> None:
    """Turn the result of a compiled call into an exception.

    Raises MemoryError, `OutOfThreads` or `InternalBug`. Asserts that the step was sound.
    """
    if result == library.NO_MEMORY:
        raise MemoryError
    if result == library.NO_THREAD:
        raise OutOfThreads("the system gives the compiled step no thread")
    if result == library.LOST:
        raise ReplicaLost("a rank of this worker has ended, or was not heard of for step_timeout_s")
    assert result != library.UNSOUND, "a token has no block, or a block id or token id does not exist"
    if result != library.DONE:
        raise InternalBug("a thread of the compiled step failed")
