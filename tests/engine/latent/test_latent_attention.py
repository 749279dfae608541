"""Absorbed latent attention against its definition, and what an engine promises of a model with it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from latent_reference import LATENT, ROPE, VOCAB, expanded_logits, latent_model, latent_spec

from pdserve.checkpoint.card import ModelCard
from pdserve.config import MIB, EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import KvGroup
from pdserve.core.model_spec import MlaSpec, NormSpec
from pdserve.core.roofline import ModelShape
from pdserve.core.step_plan import SequenceSlice, StepPlan
from pdserve.engine.kv.convert import convert_blocks
from pdserve.engine.runner import ModelRunner

LENGTH, SIZE = 45, 16
IDS = random.Random(3).choices(range(VOCAB), k=200)
TABLE = tuple(map(BlockId, (5, 2, 9, 0, 11, 7, 3, 12, 1)))
KINDS = {
    "queries-of-low-rank": LATENT,
    "queries-in-one-product": replace(LATENT, q_rank=None),
    "halves": replace(LATENT, rope=replace(ROPE, neighbours=False)),
    "plain-scale": replace(LATENT, scale=None),
    "one-head": replace(LATENT, heads=1, v_dim=4),
}


@pytest.fixture(scope="module")
def load(tiny_dir):
    card = ModelCard.load(tiny_dir)
    made: dict[object, ModelRunner] = {}

    def make(attention: MlaSpec = LATENT, weights_of: MlaSpec | None = None, **settings: object) -> ModelRunner:
        key = (attention, weights_of, *sorted(settings.items()))
        if key not in made:
            spec, weights = latent_model(weights_of or attention)
            spec = replace(spec, layers=tuple(replace(layer, attention=attention) for layer in spec.layers))
            config = EngineConfig(kv_cache_memory=MIB // 4, max_model_len=256, **{"dtype": "float32", **settings})
            made[key] = ModelRunner.make(
                replace(card, spec=spec), config, lambda dtype, device: weights.map(lambda one: one.to(device, dtype))
            )
        return made[key]

    return make


def piece(start: int, end: int, table: tuple[BlockId, ...] = TABLE, seq: int = 1) -> SequenceSlice:
    return SequenceSlice(SeqId(seq), start, tuple(IDS[start:end]), (table,), ())


def replayed(runner: ModelRunner, *cuts: int, table: tuple[BlockId, ...] = TABLE) -> torch.Tensor:
    return torch.cat([runner.logits(StepPlan((piece(start, end, table),))) for start, end in pairwise(cuts)])


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, relative to the largest logit."""
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_expanded_form_in_float64(load, kind, invariant):
    runner = load(KINDS[kind], batch_invariant=invariant)
    expected = expanded_logits(*latent_model(KINDS[kind]), IDS[:LENGTH])
    assert off(replayed(runner, 0, LENGTH), expected) < 1e-5
    assert off(replayed(runner, 0, 17, 18, 40, LENGTH), expected) < 1e-5


@pytest.mark.parametrize(
    "change",
    [{"rope": replace(ROPE, neighbours=False)}, {"rope": replace(ROPE, theta=200.0)}, {"norm": NormSpec(1e-6)}, {"scale": None},
     {"scale": 0.35}],
)  # fmt: skip
def test_a_setting_that_is_wrong_is_seen(load, change):
    expected = expanded_logits(*latent_model(), IDS[:LENGTH])
    assert off(replayed(load(replace(LATENT, **change), weights_of=LATENT), 0, LENGTH), expected) > 1e-3


def test_bfloat16_is_near(load):
    expected = expanded_logits(*latent_model(), IDS[:LENGTH])
    assert off(replayed(load(dtype="bfloat16"), 0, LENGTH), expected) < 0.05


def test_a_layer_stores_one_vector_for_each_token(load):
    group = load().kv.spec.groups
    assert group == (KvGroup((0, 1), ((1, 24),), SIZE, "float32"),)
    deepseek_v3 = MlaSpec(128, 512, 128, 64, 128, ROPE, NormSpec(1e-6), q_rank=1536)
    spec = latent_spec(deepseek_v3, layers=1)
    assert spec.kv_spec(SIZE, "bfloat16").bytes_per_token == 576 * 2
    shape = ModelShape.of(spec)
    assert (shape.kv_numbers, shape.numbers, shape.layer_numbers) == (576, spec.numbers, spec.layer_numbers)


def test_chunks_and_company_change_no_bit(load):
    """(1) Alone and whole, (2) in chunks beside another sequence, on other blocks, (3) token by token."""
    runner = load(batch_invariant=True)
    whole = replayed(runner, 0, LENGTH)
    moved, others = tuple(map(BlockId, (20, 18, 25))), tuple(map(BlockId, range(30, 42)))
    parts = []
    for start in range(0, LENGTH, 13):
        end, beside = min(LENGTH, start + 13), 3 + 4 * start
        logits = runner.logits(StepPlan((piece(0, beside, others, 2), piece(start, end, moved))))
        parts.append(logits[beside:])
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(replayed(runner, *range(LENGTH + 1), table=moved[::-1]), whole)


@pytest.mark.parametrize("stored", ["auto", "bf16", "int8", "fp8_e4m3", "int4"])
def test_a_prompt_computed_here_is_decoded_there_from_the_bytes_of_its_blocks(load, stored):
    """Bit for bit, with each format of KV. The other pool was full of another owner's numbers."""
    settings = {"kv_cache_dtype": stored} if stored in ("int8", "fp8_e4m3", "int4") else {"batch_invariant": True}
    if stored == "bf16":
        settings["kv_cache_dtype"] = stored
    here, there = load(**settings), load(**settings, max_num_seqs=63)
    assert here is not there
    here.kv.caches[0].blocks.zero_()
    there.kv.caches[0].blocks.fill_(0x11)
    replayed(here, 0, 16, 37)
    moved = tuple(map(BlockId, (3, 17, 8)))
    for source, target in zip(TABLE, moved, strict=False):
        there.kv.caches[0].blocks[target] = here.kv.caches[0].blocks[source]
    assert torch.equal(replayed(there, *range(37, LENGTH + 1), table=moved), replayed(here, *range(37, LENGTH + 1)))


@pytest.mark.parametrize(("stored", "most"), [("int8", 0.02), ("fp8_e4m3", 0.06), ("int4", 0.5)])
def test_quantised_latent_vectors_are_near_and_other_pools_convert_them(load, stored, most):
    """One scale serves the latent vector and the rotated key of a block."""
    expected = expanded_logits(*latent_model(), IDS[:LENGTH])
    runner = load(kv_cache_dtype=stored)
    assert most / 20 < off(replayed(runner, 0, 32, LENGTH), expected) < most
    plain = load()
    replayed(plain, 0, LENGTH)
    source, target = plain.kv.spec.groups[0], runner.kv.spec.groups[0]
    converted = convert_blocks(plain.kv.caches[0].blocks[list(TABLE[:3])], source, target, LENGTH)
    runner.kv.caches[0].blocks[list(TABLE[:3])] = converted
    assert off(replayed(runner, LENGTH - 1, LENGTH), expected[-1:]) < most
