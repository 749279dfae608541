"""Models of known shapes with random weights."""

from __future__ import annotations

import torch

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families.llama import LLAMA, llama_layers, llama_spec
from pdserve.config import EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.model_spec import RopeSpec
from pdserve.core.step_plan import GREEDY, SequenceSlice, StepPlan
from pdserve.engine.models.weights import DenseWeights, GqaWeights, LayerWeights, ModelWeights
from pdserve.engine.runner import ModelRunner
from tools.gpu.pools import fill
from tools.gpu.row import Setup

BLOCK_SIZE = 16


def card(name: str) -> ModelCard:
    """Return a model by name: 8b is Llama-3.1-8B, 1b is Llama-3.2-1B, small can be checked against a CPU, rehearsal is smaller
    still.
    """
    hidden, ffn, layers, heads, kv_heads, dim, vocab, tied = {
        "8b": (4096, 14336, 32, 32, 8, 128, 128256, False),
        "1b": (2048, 8192, 16, 32, 8, 64, 128256, True),
        "small": (512, 1024, 4, 8, 4, 64, 4096, True),
        "rehearsal": (64, 96, 2, 4, 2, 16, 128, True),
    }[name]
    spec = llama_spec(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, heads=heads, kv_heads=[kv_heads] * layers, head_dim=dim,
        max_position=8192, rope=RopeSpec(5e5), eps=1e-5, tied_head=tied,
    )  # fmt: skip
    return ModelCard(name, LLAMA.architecture, spec, LLAMA.tensors, eos_token_ids=(), fingerprint=name)


def random_weights(shape: ModelCard, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Return random weights for a model of this shape."""

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn((rows, columns), dtype=dtype, device=device) / columns**0.5

    hidden = shape.spec.hidden_size
    ones = torch.ones(hidden, dtype=dtype, device=device)
    layers = tuple(
        LayerWeights(
            ones,
            GqaWeights(matrix(attention.query_width + attention.kv_width, hidden), matrix(hidden, attention.out_width)),
            ones,
            DenseWeights(matrix(2 * mlp.intermediate, hidden), matrix(hidden, mlp.intermediate)),
        )
        for attention, mlp in llama_layers(shape.spec)
    )
    embedding = matrix(shape.vocab_size, hidden)
    return ModelWeights(embedding, layers, ones, embedding if shape.spec.tied_head else matrix(shape.vocab_size, hidden))


def make_runner(
    setup: Setup, shape: ModelCard, *, sequences: int, room: int, pools: int = 1, kv_cache_dtype: str = "auto"
) -> ModelRunner:
    """Return a runner for `plan`s of `sequences` sequences with blocks for `room` tokens each. The pool has `pools` such parts.

    The pool is full of random numbers. Decode steps of all batch sizes are recorded.
    """
    blocks = pools * sequences * ceil_div(room, BLOCK_SIZE)
    config = EngineConfig(
        dtype="bfloat16", device=setup.device.type, block_size=BLOCK_SIZE, max_num_seqs=sequences, max_model_len=room,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory=blocks * shape.kv_layout(BLOCK_SIZE, "bfloat16", kv_cache_dtype).block_bytes,
    )  # fmt: skip
    runner = ModelRunner.make(shape, config, lambda dtype, device: random_weights(shape, dtype, device))
    fill(runner.kv.caches[0].paged)
    return runner


def plan(shape: ModelCard, sequences: range, *, start: int, count: int, room: int) -> StepPlan:
    """Return a step with tokens [start, start + count) of each sequence, which has blocks for `room` tokens. It draws one token
    of each.
    """
    blocks = ceil_div(room, BLOCK_SIZE)
    slices = []
    for i in sequences:
        table = tuple(BlockId(i * blocks + j) for j in range(blocks))
        ids = tuple((7 + 31 * i + j) % shape.vocab_size for j in range(start, start + count))
        slices.append(SequenceSlice(SeqId(i), start, ids, (table,), (GREEDY,)))
    return StepPlan(tuple(slices))


def matrix_bytes(shape: ModelCard, runner: ModelRunner) -> int:
    """Return the bytes of the weights that a step reads whole: all except an embedding that is not also the head."""
    embedding = 2 * shape.vocab_size * shape.spec.hidden_size
    return runner.weights_bytes - (0 if shape.spec.tied_head else embedding)
