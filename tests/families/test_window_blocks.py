"""Blocks behind a sliding window are freed while a model goes on, and no step reads one: they hold NaN, and no bit changes."""

from __future__ import annotations

import random

import pytest
from family_models import Made

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import NULL_BLOCK, SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind

BLOCKS, BLOCK, OUTPUT = 24, 16, 24
WAYS = {
    "one group": ("mistral", {"dtype": "float32"}),
    "one group, invariant": ("mistral", {"dtype": "float32", "batch_invariant": True}),
    "two groups": ("gemma3", {"dtype": "float32"}),
    "two groups, bfloat16": ("qwen2", {"dtype": "bfloat16"}),
    "two groups, int8": ("qwen2", {"dtype": "float32", "kv_cache_dtype": "int8"}),
}


def serve(runner: ModelRunner, prompts: list[tuple[int, ...]], *, frees: bool) -> tuple[list[list[int]], int]:
    """Serve the prompts in chunks. Return the outputs, and the most blocks that were held at once in a group with a window.

    frees: blocks behind the window are freed. Every free block holds NaN during a step.
    """
    pool = BlockPools(*[BLOCKS] * len(runner.kv.caches), layouts=runner.kv.spec.groups if frees else ())
    scheduler = Scheduler(pool, BLOCK, max_num_seqs=4, max_num_batched_tokens=40, max_model_len=256, eos_token_ids=())
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.8, seed=7, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        scheduler.add(SeqId(number), RequestSpec(prompt, params), kind=SequenceKind.LOCAL)
    outputs: list[list[int]] = [[] for _ in prompts]
    windowed = [index for index, group in enumerate(runner.kv.spec.groups) if group.window is not None]
    most = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        for group, cache in zip(pool.groups, runner.kv.caches, strict=True):
            cache.blocks[group._free] = 0xFF
        sampled = runner.execute(plan)
        for group, cache in zip(pool.groups, runner.kv.caches, strict=True):
            assert (cache.blocks[group._free] == 0xFF).all(), "a step wrote a free block"
            cache.blocks[group._free] = 0
        for token in scheduler.collect(sampled).tokens:
            outputs[token.seq_id].append(token.token_id)
        most = max(most, *[pool.groups[index].counts().held for index in windowed])
        scheduler.check_invariants()
    assert pool.num_free == BLOCKS
    return outputs, most


@pytest.mark.quick("one group", "two groups*")
@pytest.mark.parametrize("way", WAYS)
def test_a_model_with_a_window_needs_no_block_behind_it(way, made):
    name, settings = WAYS[way]
    model: Made = made(name)
    runner = model.runner(**settings)
    rng = random.Random(way)
    prompts = [tuple(rng.choices(range(3, 512), k=count)) for count in (75, 40)]
    kept, held = serve(runner, prompts, frees=False)
    freed, held_less = serve(runner, prompts, frees=True)
    assert freed == kept
    assert all(len(output) == OUTPUT for output in freed)
    assert held_less < held


def scheduler_of(runner: ModelRunner) -> tuple[Scheduler, BlockPools]:
    pool = BlockPools(*[BLOCKS] * len(runner.kv.caches), layouts=runner.kv.spec.groups)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 40, "max_model_len": 256}
    return Scheduler(pool, BLOCK, **limits, eos_token_ids=(), prefix_salt=b"model"), pool


def finish(runner: ModelRunner, scheduler: Scheduler) -> list[int]:
    """Run until nothing is left, and return the tokens that were drawn."""
    tokens: list[int] = []
    while scheduler.has_work:
        outcome = scheduler.collect(runner.execute(scheduler.plan()))
        tokens += [token.token_id for token in outcome.tokens]
        scheduler.check_invariants()
    return tokens


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_a_hit_and_a_handoff_of_live_blocks_change_no_token(name, made):
    """(1) A prompt alone. (2) Again, over its cached blocks. (3) Computed by one engine and decoded by another one, which gets
    the live blocks of the lease and holds NaN elsewhere. (4) Again there, over what the handoff left."""
    prefill, decode = (made(name).runner(dtype="float32", batch_invariant=True) for _ in range(2))
    prompt = tuple(random.Random(name).choices(range(3, 512), k=75))
    spec = RequestSpec(prompt, SamplingParams(max_tokens=OUTPUT, temperature=0.8, seed=7, ignore_eos=True))
    lender, lent_pool = scheduler_of(prefill)
    lender.add(SeqId(1), spec, kind=SequenceKind.LOCAL)
    alone = finish(prefill, lender)
    assert len(alone) == OUTPUT
    lender.add(SeqId(2), spec, kind=SequenceKind.LOCAL)
    assert finish(prefill, lender) == alone
    assert lender.prefix.hit == 4 * BLOCK
    for cache in prefill.kv.caches:
        cache.blocks[:] = 0
    lender, lent_pool = scheduler_of(prefill)
    lender.add(SeqId(3), spec, kind=SequenceKind.LENT)
    first = finish(prefill, lender)
    (admitted,) = lender.take_admitted()
    reader, pool = scheduler_of(decode)
    room = reader.reserve(SeqId(3), spec, local_prefill=False)
    assert room is not None
    groups = zip(prefill.kv.caches, decode.kv.caches, admitted.block_tables, room.block_tables, strict=True)
    for source, target, theirs, ours in groups:
        live = source.layout.first_live(len(prompt))
        assert theirs[:live] == ours[:live] == (NULL_BLOCK,) * live
        assert NULL_BLOCK not in (*theirs[live:], *ours[live:])
        count = len(theirs) - live
        target.blocks[sorted(set(range(target.num_blocks)) - set(ours[live:]))] = 0xFF
        target.blocks[list(ours[live : live + count])] = source.blocks[list(theirs[live:])]
    reader.activate(SeqId(3), first[0])
    assert first + finish(decode, reader) == alone
    for group, cache in zip(pool.groups, decode.kv.caches, strict=True):
        cache.blocks[group._free] = 0
    reader.add(SeqId(4), spec, kind=SequenceKind.LOCAL)
    assert finish(decode, reader) == alone
    lender.return_lease(SeqId(3))
    assert lent_pool.counts().held == pool.counts().held == 0
