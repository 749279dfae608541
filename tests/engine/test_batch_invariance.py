"""In batch-invariant mode a token's logits depend on its sequence alone, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from pdserve.checkpoint.resolve import resolve
from pdserve.core.batch import StepPlan
from pdserve.core.errors import ConfigError
from pdserve.engine.attention.invariant import KV_TILE_TOKENS, QUERY_TILE
from pdserve.engine.rows import TILE_ROWS

LENGTHS = [1, 2, QUERY_TILE, TILE_ROWS + 1, 63, KV_TILE_TOKENS, KV_TILE_TOKENS + 1, 300]


def play(runner, sheets, rng: random.Random, *, budget: int) -> list[torch.Tensor]:
    """Compute all sequences together in steps of random pieces and company; each one's logits, in order."""
    done = [0] * len(sheets)
    rows: list[list[torch.Tensor]] = [[] for _ in sheets]
    while any(done[i] < len(s.tokens) for i, s in enumerate(sheets)):
        unfinished = [i for i, s in enumerate(sheets) if done[i] < len(s.tokens)]
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        ends = {i: min(len(sheets[i].tokens), done[i] + rng.choice([1, 1, 7, 40, budget])) for i in chosen}
        logits = runner.logits(StepPlan(tuple(sheets[i].piece(done[i], ends[i]) for i in chosen)))
        for i, part in zip(chosen, logits.split([ends[i] - done[i] for i in chosen]), strict=True):
            rows[i].append(part)
            done[i] = ends[i]
    return [torch.cat(parts) for parts in rows]


@pytest.mark.parametrize(("dtype", "compiled"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
@pytest.mark.parametrize("block_size", [16, 5])
def test_any_chunking_in_any_company_equals_whole_and_alone(make_runner, make_sheets, dtype, compiled, block_size):
    runner = make_runner(compiled=compiled, dtype=dtype, batch_invariant=True, block_size=block_size)
    rng = random.Random(block_size)
    sheets = make_sheets(runner, LENGTHS, rng)
    alone = [runner.logits(sheet.whole()) for sheet in sheets]
    for _ in range(3):
        for expected, found in zip(alone, play(runner, sheets, rng, budget=97), strict=True):
            assert torch.equal(expected, found)


@pytest.mark.parametrize(("dtype", "compiled"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_sixty_four_decodes_together_equal_each_alone(make_runner, make_sheets, dtype, compiled):
    runner = make_runner(compiled=compiled, dtype=dtype, batch_invariant=True)
    sheets = make_sheets(runner, [2 + 3 * i for i in range(64)], random.Random(1))
    alone = []
    for sheet in sheets:
        runner.logits(StepPlan((sheet.piece(0, len(sheet.tokens) - 1),)))
        alone.append(runner.logits(StepPlan((sheet.piece(len(sheet.tokens) - 1, len(sheet.tokens)),))))
    together = runner.logits(StepPlan(tuple(s.piece(len(s.tokens) - 1, len(s.tokens)) for s in reversed(sheets))))
    assert torch.equal(torch.cat(alone), together.flip(0))


def test_block_ids_and_what_lies_behind_the_end_do_not_matter(make_runner, make_sheets):
    runner = make_runner(batch_invariant=True)
    first, second = make_sheets(runner, [37, 37], random.Random(2))
    second.tokens = first.tokens
    expected = runner.logits(first.whole())
    runner.kv.tensor[list(second.block_table)] = torch.inf
    assert torch.equal(runner.logits(second.whole()), expected)
    runner.kv.tensor.zero_()


@pytest.fixture
def default_model() -> str:
    try:
        resolve("default")
    except ConfigError as exc:
        pytest.skip(f"the default model is not installed: {exc.message}")
    return "default"


def test_two_threads_give_the_bits_of_one(make_runner, make_sheets, default_model):
    """Prefill and decode workers may have different numbers of threads."""
    runner = make_runner(default_model, batch_invariant=True)
    (sheet,) = make_sheets(runner, [40], random.Random(3))
    one = runner.logits(sheet.whole())
    torch.set_num_threads(2)
    try:
        two = runner.logits(sheet.whole())
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one, two)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_model_too(make_runner, make_sheets, default_model, dtype):
    """Other shapes, other kernels: 9 query heads on 3, widths that are no powers of two."""
    runner = make_runner(default_model, dtype=dtype, batch_invariant=True)
    rng = random.Random(4)
    sheets = make_sheets(runner, [3, 45, 140], rng, vocab=49152)
    alone = [runner.logits(sheet.whole()) for sheet in sheets]
    for expected, found in zip(alone, play(runner, sheets, rng, budget=90), strict=True):
        assert torch.equal(expected, found)
