"""The compiled kernels on models of other shapes than the two that are installed: heads of any width, groups of any size."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families.llama import llama_spec
from pdserve.config import MIB, EngineConfig
from pdserve.core.model_spec import RopeSpec
from pdserve.core.step_plan import StepPlan
from pdserve.engine.models import native_decoder as native
from pdserve.engine.models.weights import DenseWeights, GqaWeights, LayerWeights, ModelWeights
from pdserve.engine.native import library
from pdserve.engine.runner import ModelRunner

pytestmark = pytest.mark.skipif(library.load() is None, reason="the kernels were not built, or this CPU lacks AVX2")

HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 64, 112, 2, 300
LENGTHS = [1, 64, 65, 130, 300, 17]
SHAPES = [  # head_dim, heads, KV heads, block size: one panel of dimensions, two, odd numbers, a last one half full
    (16, 2, 2, 16),
    (32, 6, 1, 32),
    (48, 4, 2, 16),
    (64, 9, 3, 16),
    (80, 7, 1, 5),
    (96, 8, 2, 64),
    (128, 16, 1, 16),
    (256, 3, 1, 16),
    (512, 1, 1, 16),
    (640, 1, 1, 16),
]
ROUNDING = {"bf16": 0.02, "fp32": 0.02, "int8": 0.03, "fp8_e4m3": 0.05, "int4": 0.2}
"""Of the root mean square: the model's of bfloat16, and what neighbouring numbers of quantised KV are apart. Seen were at
most 0.010, 0.006, 0.014, 0.026 and 0.095."""


def model_of(head_dim: int, heads: int, kv_heads: int, tiny: ModelCard) -> tuple[ModelCard, ModelWeights]:
    """Random weights, in bfloat16's numbers, that keep activations near 1; scores are spread enough to matter."""
    generator = torch.Generator().manual_seed(head_dim)

    def random_matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) * scale / columns**0.5).bfloat16()

    layers = tuple(
        LayerWeights(
            torch.ones(HIDDEN).bfloat16(),
            GqaWeights(random_matrix((heads + 2 * kv_heads) * head_dim, HIDDEN, 1.5), random_matrix(HIDDEN, heads * head_dim)),
            torch.ones(HIDDEN).bfloat16(),
            DenseWeights(random_matrix(2 * INTERMEDIATE, HIDDEN), random_matrix(HIDDEN, INTERMEDIATE)),
        )
        for _ in range(LAYERS)
    )
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    weights = ModelWeights(embedding, layers, torch.ones(HIDDEN).bfloat16(), embedding)
    spec = llama_spec(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, heads=heads, kv_heads=[kv_heads] * LAYERS,
        head_dim=head_dim, max_position=tiny.max_position, rope=RopeSpec(10000.0), eps=1e-5, tied_head=False,
    )  # fmt: skip
    return replace(tiny, spec=spec), weights


def cast(weights: ModelWeights, dtype: torch.dtype) -> ModelWeights:
    return weights.map(lambda tensor: tensor.to(dtype))


def runners(shape: tuple[int, int, int, int], kv_cache_dtype: str, tiny: ModelCard) -> tuple[ModelRunner, ModelRunner]:
    """Compiled in bfloat16, and by torch in float32."""
    *heads, block_size = shape
    card, weights = model_of(*heads, tiny)
    config = EngineConfig(
        dtype="bfloat16", kv_cache_memory=16 * MIB, kv_cache_dtype=kv_cache_dtype, block_size=block_size, max_model_len=320
    )
    compiled = ModelRunner.make(card, config, lambda dtype, _: cast(weights, dtype))
    exact = ModelRunner.make(card, replace(config, dtype="float32"), lambda dtype, _: cast(weights, dtype))
    assert isinstance(compiled._model, native.NativeDecoder)
    return compiled, exact


@pytest.mark.quick("*-bf16", "shape0-*", "shape1-int4")
@pytest.mark.parametrize("kv_cache_dtype", list(ROUNDING))
@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_and_decode_equal_torchs_up_to_rounding(shape, kv_cache_dtype, tiny_dir, make_sheets):
    """(1) Prompts of uneven lengths together, all but their last token. (2) That token of all of them: decodes."""
    compiled, exact = runners(shape, kv_cache_dtype, ModelCard.load(tiny_dir))
    sheets = make_sheets(compiled, LENGTHS, random.Random(1), vocab=VOCAB)
    prompts = StepPlan(tuple(sheet.piece(0, len(sheet.tokens) - 1) for sheet in sheets if len(sheet.tokens) > 1))
    decodes = StepPlan(tuple(sheet.piece(len(sheet.tokens) - 1, len(sheet.tokens)) for sheet in sheets))
    for plan in (prompts, decodes):
        expected, found = exact.logits(plan), compiled.logits(plan)
        apart = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
        assert apart < ROUNDING[kv_cache_dtype]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decode_has_the_bits_of_its_prefill(shape, tiny_dir, make_sheets):
    """Few rows go through other loops than many."""
    compiled, _ = runners(shape, "bf16", ModelCard.load(tiny_dir))
    sheets = make_sheets(compiled, LENGTHS, random.Random(2), vocab=VOCAB)
    expected = torch.stack([compiled.logits(sheet.whole())[-1] for sheet in sheets])
    last = [sheet.piece(len(sheet.tokens) - 1, len(sheet.tokens)) for sheet in sheets]
    assert torch.equal(compiled.logits(StepPlan(tuple(last))), expected)
    for piece, row in zip(last, expected, strict=True):
        assert torch.equal(compiled.logits(StepPlan((piece,)))[0], row)
