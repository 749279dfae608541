"""In batch-invariant mode a token's logits depend on its sequence alone, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch
from engine_ways import COMPILED, WAYS

from pdserve.checkpoint.resolve import resolve
from pdserve.core.errors import ConfigError
from pdserve.core.step_plan import StepPlan
from pdserve.engine.attention.invariant import KV_TILE_TOKENS, InvariantAttention
from pdserve.engine.layers.elementwise import exp_fixed, gelu_and_mul, gelu_and_mul_fixed, softcap_fixed
from pdserve.engine.layers.rows import CANDIDATES, PROBE_ROWS, TILE_ROWS, TiledRows, cut
from pdserve.engine.models.batched import BatchedDecoder
from pdserve.engine.native import library

LENGTHS = [1, 2, 8, TILE_ROWS + 1, 63, KV_TILE_TOKENS, KV_TILE_TOKENS + 1, 300]


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


@pytest.mark.quick("16-float32", "5-bfloat16-torch", "*-compiled")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block_size", [16, 5])
def test_any_chunking_in_any_company_equals_whole_and_alone(make_runner, make_sheets, way, block_size):
    runner = make_runner(**way, batch_invariant=True, block_size=block_size)
    rng = random.Random(block_size)
    sheets = make_sheets(runner, LENGTHS, rng)
    alone = [runner.logits(sheet.whole()) for sheet in sheets]
    for _ in range(3):
        for expected, found in zip(alone, play(runner, sheets, rng, budget=97), strict=True):
            assert torch.equal(expected, found)


@pytest.mark.quick("float32", "*-compiled")
@pytest.mark.parametrize("way", WAYS)
def test_sixty_four_decodes_together_equal_each_alone(make_runner, make_sheets, way):
    runner = make_runner(**way, batch_invariant=True)
    sheets = make_sheets(runner, [2 + 3 * i for i in range(64)], random.Random(1))
    alone = []
    for sheet in sheets:
        runner.logits(StepPlan((sheet.piece(0, len(sheet.tokens) - 1),)))
        alone.append(runner.logits(StepPlan((sheet.piece(len(sheet.tokens) - 1, len(sheet.tokens)),))))
    together = runner.logits(StepPlan(tuple(s.piece(len(s.tokens) - 1, len(s.tokens)) for s in reversed(sheets))))
    assert torch.equal(torch.cat(alone), together.flip(0))


@pytest.mark.quick("37-*", "130-*-compiled")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [5, 16, 37, 130])
def test_block_ids_and_what_lies_behind_the_end_do_not_matter(make_runner, make_sheets, way, length):
    runner = make_runner(**way, batch_invariant=True)
    first, second = make_sheets(runner, [length, length], random.Random(2))
    second.tokens = first.tokens
    expected = runner.logits(first.whole())
    runner.kv.caches[0].tensor[list(second.block_table)] = torch.inf
    assert torch.equal(runner.logits(second.whole()), expected)
    runner.kv.caches[0].tensor.zero_()


@pytest.fixture
def default_model() -> str:
    try:
        resolve("default")
    except ConfigError as exc:
        pytest.skip(f"the default model is not installed: {exc.message}")
    return "default"


@pytest.mark.quick("bfloat16-compiled")
@pytest.mark.parametrize("way", WAYS)
def test_two_threads_give_the_bits_of_one(make_runner, make_sheets, default_model, way):
    """Prefill and decode workers may have different numbers of threads."""
    runner = make_runner(default_model, **way, batch_invariant=True)
    sheets = make_sheets(runner, [40, 131], random.Random(3))
    last = StepPlan(tuple(sheet.piece(len(sheet.tokens) - 1, len(sheet.tokens)) for sheet in sheets))
    plans = [sheets[0].whole(), sheets[1].whole(), last]
    one = [runner.logits(plan) for plan in plans]
    torch.set_num_threads(2)
    try:
        two = [runner.logits(plan) for plan in plans]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert torch.equal(one[2][1], one[1][-1])


@pytest.mark.quick("bfloat16-compiled")
@pytest.mark.parametrize("way", WAYS)
def test_the_default_model_too(make_runner, make_sheets, default_model, way):
    """Other shapes, other kernels: 9 query heads on 3, widths that are no powers of two."""
    runner = make_runner(default_model, **way, batch_invariant=True)
    rng = random.Random(4)
    sheets = make_sheets(runner, [3, 45, 140], rng, vocab=49152)
    alone = [runner.logits(sheet.whole()) for sheet in sheets]
    for expected, found in zip(alone, play(runner, sheets, rng, budget=90), strict=True):
        assert torch.equal(expected, found)


@COMPILED
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_compiled_steps_are_invariant_without_being_asked(make_runner, make_sheets, quantization):
    """They have one mode: what users get for nothing."""
    runner = make_runner(dtype="bfloat16", quantization=quantization)
    assert runner.describe().startswith(f"compiled bfloat16 ({library.KNOWN[library.find().isa].title}, ")
    assert runner.describe().endswith("; batch-invariant: yes")
    assert runner.isa == library.find().isa
    rng = random.Random(6)
    sheets = make_sheets(runner, LENGTHS, rng)
    alone = [runner.logits(sheet.whole()) for sheet in sheets]
    for expected, found in zip(alone, play(runner, sheets, rng, budget=97), strict=True):
        assert torch.equal(expected, found)


def test_a_runner_says_whether_it_is_invariant(make_runner):
    assert not make_runner().batch_invariant
    assert make_runner(batch_invariant=True).batch_invariant
    assert not make_runner(compiled=False, dtype="bfloat16").batch_invariant
    assert (
        make_runner(batch_invariant=True).describe() == "torch float32 (compiled steps are for bfloat16); batch-invariant: yes"
    )
    assert make_runner().describe() == "torch float32 (compiled steps are for bfloat16); batch-invariant: no"
    quantised = make_runner(dtype="bfloat16", kv_cache_dtype="int8")  # how a block is rounded depends on how it was filled
    assert quantised.describe().endswith("; batch-invariant: no")


def test_rows_are_cut_into_few_calls():
    sizes = (4, 8, 12, 32, 64, 128)
    assert [cut(count, sizes) for count in (1, 8, 13, 37, 64, 300)] == [[4], [8], [32], [32, 8], [64], [128, 128, 32, 12]]
    for known in (sizes, (32,), (1, 2, *range(4, 33, 4), 64, 128), (32, 128)):
        for count in range(1, 600):
            pieces = cut(count, known)
            assert sum(pieces) >= count
            assert sum(cut(sum(pieces), known)) == sum(pieces)


def test_a_row_count_that_changes_bits_is_not_used():
    """Sums that start elsewhere for fewer than eight rows, as those of MKL for fewer than four."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        vectors = x.view(len(x), 20, 50)
        middle = 10 if len(x) < 8 else 25
        return (vectors[..., :middle].sum(-1) + vectors[..., middle:].sum(-1),)

    rows = TiledRows()
    x = torch.randn(PROBE_ROWS, 1000, generator=torch.Generator().manual_seed(1))
    rows.settle([(lambda y: (2 * y,), (x,)), (function, (x,))])
    assert rows.sizes == (*(size for size in CANDIDATES if 8 <= size < TILE_ROWS), TILE_ROWS, 64, 128)
    (alone,) = rows.apply(function, torch.nn.functional.pad(x[:3], (0, 0, 0, rows.padded(3) - 3)))
    assert torch.equal(alone[:3], rows.apply(function, x)[0][:3])


def test_a_lone_token_costs_less_than_a_tile_on_this_machine(make_runner):
    """Else row counts that are equal everywhere we know of were ruled out, and float32 decodes are slow again."""
    model = make_runner(batch_invariant=True)._model
    assert isinstance(model, BatchedDecoder)
    backend = model._model._backend
    assert isinstance(backend.rows, TiledRows)
    attention = backend.attention[0]._inner
    assert isinstance(attention, InvariantAttention)
    assert max(backend.rows.padded(1), attention._rows_for(1)) < TILE_ROWS


@pytest.mark.parametrize("length", [1, 31, 32, 33, 70, 16384 + 40])
def test_an_exponential_does_not_depend_on_its_place(length):
    x = torch.randn(length, generator=torch.Generator().manual_seed(2))
    together = exp_fixed(x.clone())
    torch.testing.assert_close(together, x.exp())
    for i in (0, length // 2, length - 1):
        assert torch.equal(exp_fixed(x[i : i + 1].clone()), together[i : i + 1])


@pytest.mark.parametrize("rows", [1, 31, 70])
def test_gelu_and_the_bound_of_scores_do_not_depend_on_the_place(rows):
    x = torch.randn(rows, 2 * 37, generator=torch.Generator().manual_seed(3)) * 3
    together, capped = gelu_and_mul_fixed(x), softcap_fixed(x.clone(), 2.0)
    torch.testing.assert_close(together, gelu_and_mul(x))
    torch.testing.assert_close(capped, 2.0 * torch.tanh(x / 2.0))
    for i in (0, rows // 2, rows - 1):
        assert torch.equal(gelu_and_mul_fixed(x[i : i + 1]), together[i : i + 1])
        assert torch.equal(softcap_fixed(x[i : i + 1].clone(), 2.0), capped[i : i + 1])
