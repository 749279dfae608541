"""The Llama decoder in compiled code. One call computes all layers of a step.

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
from functools import partial
from itertools import accumulate, chain
from typing import Final

import torch
from torch import Tensor

from pdserve.checkpoint.card import ModelCard
from pdserve.core.errors import ConfigError, InternalBug, OutOfThreads
from pdserve.core.ids import BlockId
from pdserve.core.step_plan import Sampled, SampleSpec, StepPlan
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layers.rope import rope_table
from pdserve.engine.models.api import Logits
from pdserve.engine.models.weights import LayerWeights, LlamaWeights
from pdserve.engine.native import library
from pdserve.engine.native.sampling import PackedRows

LANES: Final = 16  # floats in a vector; gate and up alternate in groups of so many columns
MOST_HEAD_DIM: Final = 512
GROUP: Final = 64  # 8-bit activations that share a scale; 32 4-bit weights share one
BITS: Final = {None: 16, "int8": 8, "int4": 4}  # bits of a weight, by the setting `quantization`
KV_FORMATS: Final = {"bfloat16": 0, "float32": 1, "int8": 2, "fp8_e4m3": 3, "int4": 4}  # the numbers are those of abi.h
NEEDS: Final = "bfloat16 on a CPU with AVX-512 (bf16 and VNNI), and a C++ compiler when pdserve was installed"
_QKV, _ATTENTION_OUT, _GATE_UP, _DOWN, _HEAD = range(5)
_BEFORE_ATTENTION, _BEFORE_MLP, _BEFORE_HEAD = range(3)


def obstacle(card: ModelCard, kv: KvCache) -> str | None:
    """Return the reason, in words, why the compiled code does not run this model here; None when it runs."""
    if kv.device.type != "cpu":
        return "compiled steps are for CPUs"
    if kv.dtype is not torch.bfloat16 or kv.layout.dtype not in KV_FORMATS:
        return "compiled steps are for bfloat16"
    if any(width % LANES for width in (card.hidden_size, card.intermediate_size, card.head_dim)):
        return f"compiled steps need widths that are multiples of {LANES}"
    if card.head_dim > MOST_HEAD_DIM:
        return f"compiled steps need heads of at most {MOST_HEAD_DIM}"
    return None if library.load() is not None else library.find().why


def supports(card: ModelCard, kv: KvCache) -> bool:
    """Tell whether the compiled code runs this model here.

    It needs bfloat16 on a CPU and widths of whole vectors. The dtype of KV may be any.
    """
    return obstacle(card, kv) is None


class NativeLlama:
    """The compiled decoder as the runner's `Model`.

    It copies the weights into the layout of the kernels, except the embedding, so the caller should drop the weights.
    """

    computes_in_torch = False

    def __init__(self, card: ModelCard, weights: LlamaWeights, kv: KvCache, max_positions: int, *, bits: int) -> None:
        """Copy the weights. Raises `ConfigError` when a width does not allow quantisation, MemoryError without memory.

        bits: bits of a weight: 16 (bfloat16), 8 (activations are rounded to 8 bits as well) or 4 (activations are bfloat16).
        """
        if bits != 16 and any(
            width % GROUP for width in (card.hidden_size, card.intermediate_size, card.num_heads * card.head_dim)
        ):
            raise ConfigError(f"quantization int{bits} needs a model whose widths are multiples of {GROUP}")
        loaded = library.load()
        assert loaded is not None, "the caller asked `supports`"
        self._library = loaded
        self.threads = torch.get_num_threads()
        self._pool = kv.address, kv.layout.block_size, kv.num_blocks, KV_FORMATS[kv.layout.dtype]
        self._vocab = card.vocab_size
        self._room = self._logits = torch.empty(0, card.vocab_size)
        self._logits_address = self._rows = 0
        self._embedding = weights.embedding.contiguous()
        self._rope = rope_table(card, max_positions, kv.device)
        self._rope_address = self._rope.data_ptr()
        shape = library.Shape(
            card.hidden_size, card.intermediate_size, card.num_layers, card.num_heads, card.num_kv_heads, card.head_dim,
            card.vocab_size, card.rms_norm_eps,
        )  # fmt: skip
        self._model = loaded.pdserve_model_new(ctypes.byref(shape), self._embedding.data_ptr())
        if self._model is None:
            raise MemoryError
        weakref.finalize(self, loaded.pdserve_model_free, self._model)
        for index, layer in enumerate(weights.layers):
            self._take_layer(index, layer, bits)
        self._take_norm(0, _BEFORE_HEAD, weights.norm)
        self._take(0, _HEAD, weights.head, max(bits, 8))  # a head of 4 bits costs SmolLM2 5 % of perplexity, one of 8 none

    def forward(self, plan: StepPlan, rows: list[int]) -> Logits:
        """Compute the plan, write its KV, and return the logits of `rows`.

        The plan is turned into one array for each field, so that the loops over sequences run in C. Torch is called only
        where it is needed: a call takes 10 to 90 us when the step before has emptied the CPU's caches. Raises MemoryError,
        `OutOfThreads` or `InternalBug`.
        """
        _, starts, token_ids, block_tables, _, packed = zip(*plan.slices, strict=True)
        tokens = array("i", chain.from_iterable(token_ids))
        tables = array(
            "i", b"".join(chain.from_iterable(packed) if all(packed) else map(_packed, chain.from_iterable(block_tables)))
        )
        begins = array("q", accumulate(map(len, chain.from_iterable(block_tables)), initial=0))
        best = array("i", bytes(4 * len(rows)))
        self._make_room(len(rows))
        arrays = (tokens, array("i", starts), array("i", map(len, token_ids)), begins, tables, array("i", rows))
        step = library.Step(
            self.threads, len(tokens), len(starts), len(rows), *(a.buffer_info()[0] for a in arrays),
            *self._pool, self._rope_address, self._logits_address, best.buffer_info()[0],
        )  # fmt: skip
        _done(self._library.pdserve_model_forward(self._model, ctypes.byref(step)))
        return Logits(self._logits, best.tolist(), partial(self._sample, self._logits))

    def _make_room(self, rows: int) -> None:
        """Make room for logits [rows, vocab]. All steps use the same memory.

        With new memory for each step, the system would clear its pages, which takes 10 % of a step of 64 rows.
        """
        if rows != self._rows:
            with torch.inference_mode(False):  # so that a step outside of inference mode may change them
                if rows > len(self._room):
                    self._room = torch.empty(rows, self._vocab)
                self._rows, self._logits = rows, self._room[:rows]
            self._logits_address = self._room.data_ptr()

    def _sample(self, logits: Tensor, rows: list[int], specs: list[SampleSpec]) -> list[Sampled]:
        """Draw a token for each of `rows` in compiled code; see `Samples` of models.api."""
        packed = PackedRows(rows, specs)
        _done(
            self._library.pdserve_model_sample(
                self._model, self.threads, logits.data_ptr(), packed.address, len(rows), packed.ids_address
            )
        )
        return packed.taken()

    def _take_layer(self, index: int, layer: LayerWeights, bits: int) -> None:
        self._take_norm(index, _BEFORE_ATTENTION, layer.attention_norm)
        self._take_norm(index, _BEFORE_MLP, layer.mlp_norm)
        self._take(index, _QKV, layer.qkv, bits)
        self._take(index, _ATTENTION_OUT, layer.attention_out, bits)
        self._take(index, _GATE_UP, _by_turns(layer.gate_up), bits)
        self._take(index, _DOWN, layer.down, bits)

    def _take(self, layer: int, which: int, weight: Tensor, bits: int) -> None:
        held = weight.contiguous()
        _done(self._library.pdserve_model_weight(self._model, layer, which, held.data_ptr(), *held.shape, bits))

    def _take_norm(self, layer: int, which: int, weight: Tensor) -> None:
        held = weight.float().contiguous()
        _done(self._library.pdserve_model_norm(self._model, layer, which, held.data_ptr()))


def split_batches(num_kv_heads: int) -> tuple[int, ...]:
    """Return the smallest and the largest number of decodes whose attention is cut into parts with their own memory.

    The rule is that of `plan` in plan.cpp.
    """
    most = (4 * torch.get_num_threads() - 1) // num_kv_heads
    return (1, most) if most > 1 else (1,)


def _packed(table: tuple[BlockId, ...]) -> bytes:
    return array("i", table).tobytes()


def _by_turns(gate_up: Tensor) -> Tensor:
    """Reorder gate_up [2 * width, hidden], gate first, into LANES rows of the gate, the same LANES rows of up, and so on."""
    return gate_up.view(2, -1, LANES, gate_up.shape[1]).transpose(0, 1).reshape(gate_up.shape)


def _done(result: int) -> None:
    """Turn the result of a compiled call into an exception.

    Raises MemoryError, `OutOfThreads` or `InternalBug`. Asserts that the step was sound.
    """
    if result == library.NO_MEMORY:
        raise MemoryError
    if result == library.NO_THREAD:
        raise OutOfThreads("the system gives the compiled step no thread")
    assert result != library.UNSOUND, "a token has no block, or a block id or token id does not exist"
    if result != library.DONE:
        raise InternalBug("a thread of the compiled step failed")
