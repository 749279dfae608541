"""The numerics of an engine: a name for the bits that it computes. It is found by computing, not by asking what the engine is.

A token depends on the instruction set, the compiler, the library, the device, and the formats of weights and KV. Two engines
that give the same bits for a fixed model get the same name, whatever they are. An engine whose results depend on the batch has
none.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import accumulate, pairwise
from math import gcd
from pathlib import Path
from typing import Final

from pdserve.checkpoint.card import ModelCard
from pdserve.config import EngineConfig
from pdserve.core.ids import NULL_BLOCK, BlockId, SeqId
from pdserve.core.kv_layout import KvSpec, ceil_div
from pdserve.core.model_spec import Attention, DenseSpec, LayerSpec, MlaSpec, Mlp
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.loading.load import stream_weights
from pdserve.engine.runner import ModelRunner

PROMPT: Final = 300
"""Tokens of the longest prompt: more than any chunk of positions that a kernel takes at once."""
LENGTHS: Final = (PROMPT, 64, 1, 17, 33, 5, 128)
"""The tokens of the prompts. The single tokens after them are a step of seven rows, which no kernel takes as whole tiles."""
WINDOW: Final = 96
"""The longest window of the probe, beyond which two of its prompts reach."""
WHOLE: Final = 64
"""Quantised compiled steps need widths that are multiples of this number."""
NAME_BYTES: Final = 8


def numerics_of(runner: ModelRunner, card: ModelCard, config: EngineConfig) -> str:
    """Return the name of an engine's numerics, or "" when a token depends on the batch in which it is computed.

    card, config: those with which the runner was made. By these settings a small model is computed that has made-up weights and
    the features of the served one: a step of whole prompts, a step of single tokens, and a step of one token. The name is a
    hash of all logits and drawn tokens. Weights of integers are computed as they are, too: rounding a row to integers hides
    most last bits of attention from so few tokens, but not from all tokens that a worker computes.
    """
    if not runner.batch_invariant:
        return ""
    small = probe_card(card)
    layout = small.kv_layout(config.block_size, config.dtype, config.kv_cache_dtype)
    blocks = sum(ceil_div(length + 2, config.block_size) for length in LENGTHS)
    digest = hashlib.blake2b(digest_size=NAME_BYTES)
    for quantization in dict.fromkeys((config.quantization, None)):
        probed = ModelRunner.make(
            small,
            replace(
                config, max_model_len=PROMPT + 2, max_num_seqs=len(LENGTHS), max_num_batched_tokens=sum(LENGTHS),
                tensor_parallel_size=1, pipeline_parallel_size=1, enable_expert_parallel=False, rank_collective="auto",
                # Degrees change no bit, nor does the way in which ranks give each other rows.
                kv_cache_memory=blocks * layout.block_bytes, quantization=quantization,
            ),
            lambda dtype, device: stream_weights(Path(), small, dtype, device, load_format="dummy"),
        )  # fmt: skip
        for plan in _plans(layout, small.vocab_size):
            digest.update(probed.logits(plan).cpu().numpy().tobytes())
            digest.update(repr(probed.execute(plan)).encode())
    return digest.hexdigest()


def probe_card(card: ModelCard) -> ModelCard:
    """Return a small model with the features of the served model: the first layer of each kind, and at least two layers."""
    spec = card.spec
    attentions: dict[object, Attention] = {}
    kinds: dict[frozenset[str], LayerSpec] = {}
    for layer in spec.layers:
        kind = frozenset(layer.features)
        if kind not in kinds:
            attention = _small_attention(layer.attention)
            shared = attentions.setdefault((attention.planes, attention.window), attention)  # a KV group has one kind of heads
            kinds[kind] = replace(layer, attention=shared, mlp=_small_mlp(layer.mlp))
    layers = tuple(kinds.values())
    small = replace(
        spec, vocab_size=_small(spec.vocab_size, 512), hidden_size=_small(spec.hidden_size, 256), max_position=PROMPT + 2,
        layers=layers * 2 if len(layers) == 1 else layers,
    )  # fmt: skip
    return replace(card, name="numerics", spec=small, eos_token_ids=(), fingerprint="numerics")


def _small(width: int, most: int) -> int:
    """Return a width of about `most`, if the given one is larger. The compiled code computes both or neither."""
    return width if width <= most else most + width % WHOLE


def _fewer(count: int, dim: int, most: int) -> int:
    """Return `most` heads of `dim` numbers, if there are more, or as many as the compiled code needs for whole widths."""
    whole = gcd(count * dim, WHOLE)
    return next(few for few in range(min(count, most), count + 1) if few * dim % whole == 0)


def _small_attention(attention: Attention) -> Attention:
    """Return attention with fewer heads of the same size, whose window is shorter than the longest prompt."""
    if isinstance(attention, MlaSpec):
        heads = _fewer(attention.heads, attention.v_dim, 4)
        return replace(attention, heads=heads, q_rank=attention.q_rank and _small(attention.q_rank, 256))
    kv_heads = _fewer(attention.kv_heads, attention.v_dim, 2)
    each = _fewer(attention.heads // attention.kv_heads, kv_heads * attention.v_dim, 4)
    window = None if attention.window is None else min(attention.window, WINDOW)
    return replace(attention, heads=kv_heads * each, kv_heads=kv_heads, window=window)


def _small_mlp(mlp: Mlp) -> Mlp:
    """Return an MLP with fewer numbers, and with fewer experts from which a token still chooses some."""
    if isinstance(mlp, DenseSpec):
        return replace(mlp, intermediate=_small(mlp.intermediate, 512))
    groups, each = min(mlp.groups, 4), min(mlp.experts // mlp.groups, 8)
    top_groups = max(1, mlp.top_groups * groups // mlp.groups)
    return replace(
        mlp, experts=groups * each, experts_per_token=min(mlp.experts_per_token, 4, top_groups * each), groups=groups,
        top_groups=top_groups, intermediate=_small(mlp.intermediate, 128), shared=_small(mlp.shared, 128),
    )  # fmt: skip


def _plans(layout: KvSpec, vocab_size: int) -> list[StepPlan]:
    """Return the steps. No two sequences share a block."""
    starts = [0, *accumulate(ceil_div(length + 2, layout.block_size) for length in LENGTHS)]
    tables = [tuple(map(BlockId, range(start, end))) for start, end in pairwise(starts)]

    def piece(i: int, start: int, count: int) -> SequenceSlice:
        ids = tuple((7 + 31 * i + 13 * j) % vocab_size for j in range(start, start + count))
        dead_blocks = [group.first_live(start) for group in layout.groups]
        own = tuple((NULL_BLOCK,) * dead + tables[i][dead:] for dead in dead_blocks)
        return SequenceSlice(SeqId(i), start, ids, own, (SampleSpec(SamplingParams(temperature=0.9, seed=i), start),))

    return [
        StepPlan(tuple(piece(i, 0, length) for i, length in enumerate(LENGTHS))),
        StepPlan(tuple(piece(i, length, 1) for i, length in enumerate(LENGTHS))),
        StepPlan((piece(0, PROMPT + 1, 1),)),
    ]
