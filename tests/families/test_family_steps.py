"""In batch-invariant mode no bit depends on how a sequence is computed, for a model of each kind of layer."""

from __future__ import annotations

import random

import pytest
import torch
from family_models import LENGTH, Made, Sheet

from pdserve.core.ids import NULL_BLOCK, SeqId
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import StepPlan
from pdserve.engine.runner import ModelRunner
from tests.engine.serving import serve

KINDS = {"window": "mistral", "gemma": "gemma3", "bounded scores": "gemma2", "experts": "qwen2-moe", "latent": "deepseek-v3"}
BLOCK = 16
OUTPUT = 20


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def pair(request, made) -> tuple[Made, ModelRunner]:
    model = made(request.param)
    return model, model.runner(batch_invariant=True)


def test_chunks_in_company_are_the_whole_alone(pair):
    model, runner = pair
    whole = runner.logits(Sheet.of(runner, model.ids, 1).whole())
    rng = random.Random(1)
    for seed in (2, 3):
        sheet, other = Sheet.of(runner, model.ids, seed), Sheet.of(runner, tuple(rng.choices(range(512), k=90)), seed + 2)
        found, start = [], 0
        while start < LENGTH:
            end = min(LENGTH, start + rng.choice([1, 5, 17, 30]))
            rows = runner.logits(StepPlan((other.piece(start, start + 30 - seed), sheet.piece(start, end))))
            found.append(rows[30 - seed :])
            start = end
        assert torch.equal(torch.cat(found), whole)


def test_a_sequence_on_the_blocks_of_another_is_one_on_its_own(pair):
    """The first blocks of both hold the same tokens: a hit of the prefix cache."""
    model, runner = pair
    first, own = Sheet.of(runner, model.ids, 1), Sheet.of(runner, model.ids, 2)
    whole = runner.logits(first.whole())
    tables = tuple((*theirs[:2], *ours[2:]) for theirs, ours in zip(first.tables, own.tables, strict=True))
    hit = Sheet(model.ids, own.groups, tables, SeqId(2))
    assert torch.equal(runner.logits(StepPlan((hit.piece(2 * BLOCK, LENGTH),))), whole[2 * BLOCK :])


def test_blocks_moved_to_another_engine_go_on_alike(pair):
    """What a handoff does: the bytes of each live block of each KV group go to other blocks of another pool."""
    model, prefill = pair
    decode = model.runner(batch_invariant=True)
    lent, taken = Sheet.of(prefill, model.ids, 1), Sheet.of(decode, model.ids, 6)
    whole = prefill.logits(lent.whole())
    tables = lent.live(3 * BLOCK), taken.live(3 * BLOCK)
    for theirs, ours, *both in zip(prefill.kv.caches, decode.kv.caches, *tables, strict=True):
        source, target = ([block for block in table if block != NULL_BLOCK] for table in both)
        ours.blocks[target] = theirs.blocks[source]
    for position in range(3 * BLOCK, LENGTH):
        assert torch.equal(decode.logits(StepPlan((taken.piece(position, position + 1),)))[0], whole[position])


def test_preempted_sequences_get_the_tokens_of_lone_ones(pair):
    _, runner = pair
    rng = random.Random(2)
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.8, seed=7, ignore_eos=True)
    requests = [(tuple(rng.choices(range(3, 512), k=count)), params) for count in (9, 16, 30)]
    alone = [serve(runner, [request], blocks=12, budget=64)[0][0] for request in requests]
    squeezed, preempted = serve(runner, requests, blocks=4, budget=24)
    assert squeezed == alone
    assert preempted > 0
