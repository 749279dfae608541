"""Prompts that begin alike: computed once, never wrong. `test_scheduler_machine.py` has the random histories."""

from __future__ import annotations

import random

import pytest
from engine_ways import WAYS

from pdserve.checkpoint.card import ModelCard
from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind

BLOCK = 16
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def make(num_blocks: int = 256, *, budget: int = 512, salt: bytes | None = b"model") -> Scheduler:
    return Scheduler(
        BlockPools(num_blocks),
        BLOCK,
        max_num_seqs=64,
        max_num_batched_tokens=budget,
        max_model_len=num_blocks * BLOCK,
        eos_token_ids=(),
        prefix_salt=salt,
    )


def finish(scheduler: Scheduler, runner=None) -> tuple[int, dict[SeqId, list[int]]]:
    """Run until nothing is left: tokens computed, and each sequence's output. Without a runner every token is 7."""
    computed, outputs = 0, {}
    while scheduler.has_work:
        plan = scheduler.plan()
        computed += plan.num_tokens
        if runner is None:
            sampled = [(7, None) for _ in plan.specs]
        else:
            sampled = runner.execute(plan)
        for token in scheduler.collect(sampled).tokens:
            outputs.setdefault(token.seq_id, []).append(token.token_id)
        scheduler.check_invariants()
    return computed, outputs


def add(
    scheduler: Scheduler, seq_id: int, prompt: tuple[int, ...], kind: SequenceKind = SequenceKind.LOCAL, cache_salt: str = ""
) -> None:
    scheduler.add(SeqId(seq_id), RequestSpec(prompt, GREEDY, cache_salt=cache_salt), kind=kind)


def test_a_system_prompt_shared_by_a_hundred_requests_is_computed_once():
    scheduler = make()
    system = tuple(random.Random(1).randrange(1000) for _ in range(1000))
    add(scheduler, 0, (*system, 1, 2, 3))
    finish(scheduler)
    computed = 0
    for number in range(1, 100):
        add(scheduler, number, (*system, number, 2, 3))
        computed += finish(scheduler)[0]
    rest = len(system) % BLOCK + 3  # behind the last whole block that is shared
    assert computed == 99 * (rest + GREEDY.max_tokens - 1)
    assert scheduler.prefix.hit == 99 * (len(system) - len(system) % BLOCK)
    assert scheduler.prefix.queried == 100 * (len(system) + 3)


def test_the_same_prompt_again_still_computes_its_last_token():
    """Its logits are what the first token is drawn from."""
    scheduler = make()
    prompt = tuple(range(4 * BLOCK))
    add(scheduler, 0, prompt)
    finish(scheduler)
    add(scheduler, 1, prompt)
    plan = scheduler.plan()
    assert [(s.start, len(s.token_ids)) for s in plan.slices] == [(3 * BLOCK, BLOCK)]


def test_a_conversations_next_turn_finds_its_last_answer_too():
    scheduler = make()
    prompt = tuple(range(100, 100 + 2 * BLOCK - 2))
    add(scheduler, 0, prompt)
    finish(scheduler)
    add(scheduler, 1, (*prompt, 7, 7, 7, 7, 50))  # two of the answer's tokens filled the second block
    assert scheduler.plan().slices[0].start == 2 * BLOCK


def test_two_models_never_share():
    first, second = make(salt=b"one"), make(salt=b"two")
    for scheduler in (first, second):
        add(scheduler, 0, tuple(range(BLOCK)))
    hashes = [scheduler._waiting[0].chain.first(1, tuple(range(BLOCK))) for scheduler in (first, second)]
    assert hashes[0] != hashes[1]


def test_requests_share_only_with_those_of_the_same_salt():
    scheduler = make()
    prompt = tuple(range(2 * BLOCK + 1))
    starts = []
    for number, salt in enumerate(("a", "b", "", "a", "b", "")):
        add(scheduler, number, prompt, cache_salt=salt)
        starts.append(scheduler.plan().slices[0].start)
        scheduler.collect([(7, None)])
        scheduler.abort(SeqId(number))
    assert starts == [0, 0, 0, 2 * BLOCK, 2 * BLOCK, 2 * BLOCK]


def test_without_a_salt_nothing_is_kept():
    scheduler = make(salt=None)
    add(scheduler, 0, tuple(range(64)))
    finish(scheduler)
    assert scheduler._pool.counts().cached == 0


def test_what_is_cached_makes_room_for_what_runs():
    """A pool full of cached blocks is an empty pool to a request that shares none of them."""
    scheduler = make(num_blocks=8)
    add(scheduler, 0, tuple(range(7 * BLOCK)))
    finish(scheduler)
    assert scheduler._pool.counts().cached == 7
    add(scheduler, 1, tuple(range(1000, 1000 + 7 * BLOCK)))
    assert finish(scheduler)[1][SeqId(1)] == [7] * GREEDY.max_tokens


def test_hits_that_are_about_to_be_evicted_are_not_counted_as_room():
    """The head shares six cached blocks and needs two more: evicting its own hits for it would be a circle."""
    scheduler = make(num_blocks=8)
    add(scheduler, 0, tuple(range(6 * BLOCK + 1)))
    finish(scheduler)
    add(scheduler, 1, tuple(range(8 * BLOCK - 5)))
    _, outputs = finish(scheduler)
    assert len(outputs[SeqId(1)]) == GREEDY.max_tokens


@pytest.mark.quick("float32", "*-compiled")
@pytest.mark.parametrize("way", WAYS)
def test_a_hit_is_the_miss_bit_for_bit(make_runner, tiny_dir, way):
    """In batch-invariant mode the tokens of a shared prefix, whole or in part, are those of a run without any cache."""
    runner = make_runner(**way, batch_invariant=True)
    rng = random.Random(3)
    vocab = ModelCard.load(tiny_dir).vocab_size
    system = [rng.randrange(vocab) for _ in range(200)]
    prompts = [
        tuple(system[: rng.randrange(1, 200)] + [rng.randrange(vocab) for _ in range(rng.randrange(1, 60))]) for _ in range(24)
    ]
    outputs = []
    for salt in (None, b"model"):
        scheduler = make(salt=salt, budget=48)
        found: dict[SeqId, list[int]] = {}
        for start in range(0, len(prompts), 6):  # six at a time, each group after the last
            for number, prompt in enumerate(prompts[start : start + 6]):
                add(scheduler, start + number, prompt)
            found |= finish(scheduler, runner)[1]
        outputs.append(found)
    assert outputs[0] == outputs[1]
    assert scheduler.prefix.hit > 1000
