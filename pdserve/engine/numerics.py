"""The numerics of an engine: a name for the bits that it computes. It is found by computing, not by asking what the engine is.

A token depends on the instruction set, the compiler, the library, the device, and the formats of weights and KV. Two engines
that give the same bits for a fixed model get the same name, whatever they are. An engine whose results depend on the batch has
none.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families.llama import LLAMA, llama_spec
from pdserve.config import EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.model_spec import RopeSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.loading.load import stream_weights
from pdserve.engine.runner import ModelRunner

SEQUENCES: Final = 7
"""Sequences of the probe. Their single tokens are a step of seven rows, which no kernel takes as whole tiles."""
PROMPT: Final = 300
"""Tokens of the longest prompt: more than any chunk of positions that a kernel takes at once."""
NAME_BYTES: Final = 8


def numerics_of(runner: ModelRunner, config: EngineConfig) -> str:
    """Return the name of an engine's numerics, or "" when a token depends on the batch in which it is computed.

    config: the settings with which the runner was made. By these settings a small model with made-up weights is computed: a
    step of whole prompts, a step of single tokens, and a step of one token. The name is a hash of all logits and drawn tokens.
    """
    if not runner.batch_invariant:
        return ""
    card = _card()
    blocks = ceil_div(PROMPT + 2, config.block_size)
    layout = card.kv_layout(config.block_size, config.dtype, config.kv_cache_dtype)
    probed = ModelRunner.make(
        card,
        replace(
            config, max_model_len=PROMPT + 2, max_num_seqs=SEQUENCES,
            kv_cache_memory=SEQUENCES * blocks * layout.block_bytes,
        ),
        lambda dtype, device: stream_weights(Path(), card, dtype, device, load_format="dummy"),
    )  # fmt: skip
    digest = hashlib.blake2b(digest_size=NAME_BYTES)
    for plan in _plans(blocks):
        digest.update(probed.logits(plan).cpu().numpy().tobytes())
        digest.update(repr(probed.execute(plan)).encode())
    return digest.hexdigest()


@cache
def _card() -> ModelCard:
    spec = llama_spec(
        vocab_size=512, hidden_size=256, intermediate_size=512, heads=4, kv_heads=[2, 2], head_dim=64,
        max_position=PROMPT + 2, rope=RopeSpec(1e4), eps=1e-5, tied_head=True,
    )  # fmt: skip
    return ModelCard("numerics", LLAMA.architecture, spec, LLAMA.tensors, eos_token_ids=(), fingerprint="numerics")


def _plans(blocks: int) -> list[StepPlan]:
    """Return the steps. blocks: the blocks of each sequence."""
    lengths = [PROMPT, 64, 1, 17, 33, 5, 128]
    tables = [tuple(BlockId(i * blocks + j) for j in range(blocks)) for i in range(SEQUENCES)]

    def piece(i: int, start: int, count: int) -> SequenceSlice:
        ids = tuple((7 + 31 * i + 13 * j) % 512 for j in range(start, start + count))
        return SequenceSlice(SeqId(i), start, ids, (tables[i],), (SampleSpec(SamplingParams(temperature=0.9, seed=i), start),))

    return [
        StepPlan(tuple(piece(i, 0, length) for i, length in enumerate(lengths))),
        StepPlan(tuple(piece(i, length, 1) for i, length in enumerate(lengths))),
        StepPlan((piece(0, PROMPT + 1, 1),)),
    ]
