"""Layers that differ in everything that a spec may change: compiled code against torch, and against itself in other company."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families.llama import llama_layers
from pdserve.config import MIB, EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.model_spec import AttentionSpec, DenseSpec, LayerSpec, ModelSpec, NormSpec, RopeSpec
from pdserve.core.step_plan import SequenceSlice, StepPlan
from pdserve.engine.models import native_decoder as native
from pdserve.engine.models.weights import DenseWeights, GqaWeights, LayerWeights, ModelWeights
from pdserve.engine.native import library
from pdserve.engine.runner import ModelRunner

pytestmark = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX-512 bf16")
HIDDEN, VOCAB, SIZE = 128, 192, 16
SHAPES = [  # heads, kv_heads, head_dim, intermediate, theta, eps: three KV groups, whose layers are mixed
    (4, 2, 32, 192, 10000.0, 1e-5),
    (2, 1, 64, 320, 500.0, 1e-2),
    (4, 2, 32, 64, 500.0, 1e-3),
    (8, 4, 16, 128, 10000.0, 1e-5),
    (2, 1, 64, 64, 10000.0, 1e-5),
]
LENGTHS = (1, 17, 90, 200)
ROUNDING = {"bf16": 0.02, "int8": 0.04, "fp8_e4m3": 0.1, "int4": 0.3}  # as in test_native_shapes


def spec_of() -> ModelSpec:
    layers = tuple(
        LayerSpec(AttentionSpec(heads, kv_heads, dim, dim, RopeSpec(theta)), DenseSpec(ffn), NormSpec(eps))
        for heads, kv_heads, dim, ffn, theta, eps in SHAPES
    )
    return ModelSpec(VOCAB, HIDDEN, layers, NormSpec(1e-4), max_position=2048, tied_head=False)


def weights_of(spec: ModelSpec, dtype: torch.dtype) -> ModelWeights:
    """Random weights, in bfloat16's numbers, that keep activations near 1."""
    generator = torch.Generator().manual_seed(3)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).bfloat16().to(dtype)

    def norm() -> torch.Tensor:
        return (0.75 + torch.rand(HIDDEN, generator=generator) / 2).bfloat16().to(dtype)

    layers = tuple(
        LayerWeights(
            norm(),
            GqaWeights(matrix(attention.query_width + attention.kv_width, HIDDEN), matrix(HIDDEN, attention.out_width)),
            norm(),
            DenseWeights(matrix(2 * mlp.intermediate, HIDDEN), matrix(HIDDEN, mlp.intermediate)),
        )
        for attention, mlp in llama_layers(spec)
    )
    return ModelWeights(matrix(VOCAB, HIDDEN) * HIDDEN**0.5, layers, norm(), matrix(VOCAB, HIDDEN))


@pytest.fixture(scope="module")
def make(tiny_dir):
    def make(**settings: object) -> ModelRunner:
        spec = spec_of()
        card = replace(ModelCard.load(tiny_dir), spec=spec)
        config = EngineConfig(kv_cache_memory=8 * MIB, max_model_len=512, **settings)
        return ModelRunner.make(card, config, lambda dtype, _: weights_of(spec, dtype))

    yield make
    torch.set_num_threads(1)


def pieces(runner: ModelRunner, seed: int) -> list[SequenceSlice]:
    """One whole sequence of each length, on blocks that are scattered differently in each group."""
    rng, tables = random.Random(7), random.Random(seed)
    free = [tables.sample(range(runner.kv.num_blocks), runner.kv.num_blocks) for _ in runner.kv.spec.groups]
    made = []
    for i, length in enumerate(LENGTHS):
        own = tuple(tuple(BlockId(blocks.pop()) for _ in range(-(-length // SIZE))) for blocks in free)
        made.append(SequenceSlice(SeqId(i), 0, tuple(rng.randrange(VOCAB) for _ in range(length)), own, ()))
    return made


def cut(piece: SequenceSlice, start: int, end: int) -> SequenceSlice:
    return piece._replace(start=start, token_ids=piece.token_ids[start:end])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kv_cache_dtype", ROUNDING)
def test_prefill_and_decode_equal_torchs_up_to_rounding(make, kv_cache_dtype, threads):
    """(1) Prompts of uneven lengths together, all but their last token. (2) That token of all of them: decodes."""
    exact = make(dtype="float32", kv_cache_dtype=kv_cache_dtype, threads=1)
    compiled = make(dtype="bfloat16", kv_cache_dtype=kv_cache_dtype, threads=threads)
    assert isinstance(compiled._model, native.NativeDecoder)
    assert len(compiled.kv.caches) == 3
    whole = pieces(compiled, seed=1)
    prompts = StepPlan(tuple(cut(one, 0, len(one.token_ids) - 1) for one in whole if len(one.token_ids) > 1))
    decodes = StepPlan(tuple(cut(one, len(one.token_ids) - 1, len(one.token_ids)) for one in whole))
    for plan in (prompts, decodes):
        expected, found = exact.logits(plan), compiled.logits(plan)
        assert (found - expected).square().mean().sqrt() / expected.square().mean().sqrt() < ROUNDING[kv_cache_dtype]


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_company_chunks_and_threads_change_no_bit(make, quantization):
    """(1) All sequences whole in one step of two threads, which share rows. (2) Each alone, token by token, with one thread."""
    settings = {"dtype": "bfloat16", "quantization": quantization}
    together, alone = (make(threads=threads, **settings) for threads in (2, 1))
    expected = together.logits(StepPlan(tuple(pieces(together, seed=2))))
    singles = [
        alone.logits(StepPlan((cut(one, at, at + 1),))) for one in pieces(alone, seed=3) for at in range(len(one.token_ids))
    ]
    assert torch.equal(torch.cat(singles), expected)
