"""Every feature of a dense model against a reference in float64, alone and together, and bit for bit in any company."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from random_model import LAYER, MODELS, VOCAB, make, model, random_weights

from pdserve.checkpoint.card import ModelCard
from pdserve.core.errors import ConfigError
from pdserve.core.ids import NULL_BLOCK, BlockId, SeqId
from pdserve.core.model_spec import LayerSpec, ModelSpec, NormSpec
from pdserve.core.step_plan import SequenceSlice, StepPlan
from pdserve.engine.layers.elementwise import rms_norm
from pdserve.engine.models.decoder import FEATURES, UNEQUAL_SCORES, obstacle
from tests.engine.native.spec_reference import spec_logits

LENGTH, SIZE = 24, 4
IDS = random.Random(5).choices(range(VOCAB), k=200)
ELSEWHERE, SHAPE = {"latent attention", "a mixture of experts"}, {"a v_dim other than qk_dim"}


@pytest.fixture(scope="module")
def tiny(tiny_dir):
    return ModelCard.load(tiny_dir)


def piece(start: int, end: int, tables: list[list[int]], seq: int = 1, ids: list[int] = IDS) -> SequenceSlice:
    return SequenceSlice(SeqId(seq), start, tuple(ids[start:end]), tuple(tuple(map(BlockId, one)) for one in tables), ())


def shuffled(runner, seed: int, length: int = LENGTH, *, half: int = 0) -> list[list[int]]:
    """A block table for each group, of blocks of one half of the pool."""
    rng, middle = random.Random(seed), runner.kv.num_blocks // 2
    return [rng.sample(range(half * middle, (half + 1) * middle), -(-length // SIZE)) for _ in runner.kv.spec.groups]


def whole(runner, length: int = LENGTH) -> torch.Tensor:
    return runner.logits(StepPlan((piece(0, length, shuffled(runner, 1, length)),)))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("invariant", [False, True])
def test_logits_are_those_of_a_reference_in_float64(tiny, name, invariant):
    spec = MODELS[name]
    expected = spec_logits(spec, random_weights(spec, torch.float32), IDS[:LENGTH])
    found = whole(make(spec, tiny, batch_invariant=invariant, block_size=SIZE))
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize("name", ["gemma", "bias"])
def test_bfloat16_stays_close(tiny, name):
    spec = MODELS[name]
    expected = spec_logits(spec, random_weights(spec, torch.bfloat16), IDS[:LENGTH])
    for invariant in (False, True):
        runner = make(spec, tiny, batch_invariant=invariant, block_size=SIZE, dtype="bfloat16")
        assert error(whole(runner), expected) < 0.1


def test_every_feature_has_a_model_and_matters():
    """Each model without its feature gives other logits, so a decoder that leaves the feature out fails the test above."""
    assert set(MODELS) - {"plain", "gemma"} == FEATURES - ELSEWHERE
    for name in FEATURES - ELSEWHERE - SHAPE:  # without its feature, a model of another shape has no weights
        spec = MODELS[name]
        assert set(spec.features) == {name}
        weights = random_weights(spec, torch.float32)
        without = spec_logits(model(*(LAYER for _ in spec.layers)), weights, IDS[:LENGTH])
        assert error(without, spec_logits(spec, weights, IDS[:LENGTH])) > 0.01, name


@pytest.mark.parametrize("change", [-1, 1])
def test_a_window_that_is_off_by_one_is_seen(tiny, change):
    spec = MODELS["window"]
    shifted = model(*(replace(one, attention=replace(one.attention, window=7 + change)) for one in spec.layers))
    assert error(whole(make(shifted, tiny, block_size=SIZE)), whole(make(spec, tiny, block_size=SIZE))) > 0.01


@pytest.mark.parametrize(
    ("name", "dtype", "block_size"),
    [("gemma", "float32", 4), ("gemma", "float32", 5), ("gemma", "bfloat16", 16),
     ("a v_dim other than qk_dim", "float32", 4)],
)  # fmt: skip
def test_chunks_and_company_change_no_bit(tiny, name, dtype, block_size):
    """(1) Whole and alone, (2) in pieces of any size beside another sequence, on other blocks, with NaN in all blocks that lie
    in front of the window, (3) the last token alone."""
    spec = MODELS[name]
    runner = make(spec, tiny, batch_invariant=True, block_size=block_size, dtype=dtype)
    expected = whole(runner, 170)
    rng = random.Random(block_size)
    other, moved = shuffled(runner, 8, 200, half=1), shuffled(runner, 9, 170)
    done, parts = 0, []
    while done < 170:
        end = min(170, done + rng.choice([1, 1, 2, 9, 40, 70]))
        beside = rng.randint(1, 90)
        plan = StepPlan((piece(0, beside, other, 2, IDS[::-1]), piece(done, end, moved)))
        parts.append(runner.logits(plan)[beside:])
        done = end
        forget(runner, spec, moved, min(done, 169))
    assert torch.equal(torch.cat(parts), expected)
    assert torch.equal(runner.logits(StepPlan((piece(169, 170, moved),))), expected[169:])


def forget(runner, spec: ModelSpec, tables: list[list[int]], computed: int) -> None:
    """Destroy the blocks that no later token sees, and take them out of the tables."""
    for group, (layers, kv) in enumerate(zip(spec.kv_groups, runner.kv.caches, strict=True)):
        if spec.layers[layers[0]].attention.window is not None:
            dead = kv.layout.first_live(computed)
            kv.blocks[[block for block in tables[group][:dead] if block != NULL_BLOCK]] = 255  # the bits of NaN
            tables[group][:dead] = [NULL_BLOCK] * dead


@pytest.mark.parametrize("invariant", [False, True])
def test_a_window_longer_than_the_context_changes_no_bit(tiny, invariant):
    wide = model(*(replace(one, attention=replace(one.attention, window=LENGTH)) for one in MODELS["plain"].layers))
    settings = {"batch_invariant": invariant, "block_size": SIZE}
    assert torch.equal(whole(make(wide, tiny, **settings)), whole(make(MODELS["plain"], tiny, **settings)))


def test_one_group_with_two_scales_is_refused_by_name(tiny):
    """Attention takes one scale for a KV group."""
    first, second = MODELS["scale"].layers[0], MODELS["softcap"].layers[0]
    spec = model(first, second)
    assert obstacle(spec) == UNEQUAL_SCORES
    with pytest.raises(ConfigError, match=f"has {UNEQUAL_SCORES}, which no engine here computes"):
        make(spec, tiny)


def test_layers_of_other_norms_may_follow_each_other(tiny):
    """The norm after a layer belongs to the next one."""
    layers: tuple[LayerSpec, ...] = (LAYER, replace(LAYER, norms=NormSpec(0.1)), replace(LAYER, norms=NormSpec(1e-5, 1.0)))
    spec = model(*layers)
    expected = spec_logits(spec, random_weights(spec, torch.float32), IDS[:LENGTH])
    assert error(whole(make(spec, tiny, block_size=SIZE)), expected) < 1e-5


def test_a_norm_with_an_offset_is_rounded_once():
    """Llama rounds before the weight. Gemma does not, and one plus a small weight in bfloat16 would lose the weight."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(shape, generator=generator).mul(0.1).bfloat16() for shape in ((9, 64), (64,)))
    wide = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = (wide * (1 + weight.float())).bfloat16()
    assert (rms_norm(x, weight, 1e-6, 1.0) == expected).float().mean() > 0.99
    assert (rms_norm(x, weight + 1, 1e-6) == expected).float().mean() < 0.9
