"""Logits that are no numbers: no token is drawn from such a row, in no way of sampling, and no other row is the worse."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import sampling_cases
from torch import Tensor

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import GREEDY, NO_TOKEN, SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.native import library
from pdserve.engine.sampler import sample
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind

VOCAB = 512
NAN, INF = math.nan, math.inf

KINDS = {
    "one nan first": lambda row: row.index_fill_(0, torch.tensor([0]), NAN),
    "one nan last": lambda row: row.index_fill_(0, torch.tensor([VOCAB - 1]), NAN),
    "all nan": lambda row: row.fill_(NAN),
    "all minus infinity": lambda row: row.fill_(-INF),
    "one infinity": lambda row: row.index_fill_(0, torch.tensor([300]), INF),
}


def compiled(runner, logits: Tensor, specs: list[SampleSpec]):
    """As a compiled step does: the largest of each row is found with the logits, the rest is asked for by row."""
    model = runner._model
    best = [token_id for token_id, _ in model._sample(logits.clone(), list(range(len(specs))), [GREEDY] * len(specs))]
    return sample(logits.clone(), specs, best, lambda rows, asked: model._sample(logits.clone(), rows, asked))


@pytest.fixture(scope="module")
def samplers(make_runner):
    """Each way of sampling there is here."""
    ways = {"torch": lambda logits, specs: sample(logits.clone(), specs)}
    if library.load() is not None:
        runner = make_runner("tiny", dtype="bfloat16")
        ways["compiled"] = lambda logits, specs: compiled(runner, logits, specs)
    if torch.cuda.is_available():
        ways["cuda"] = lambda logits, specs: sample(logits.to("cuda"), specs)
    return ways


@pytest.mark.quick("one nan last", "all minus infinity", "one infinity")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(case=sampling_cases(vocab=VOCAB), bad=st.sets(st.integers(0, 4), min_size=1))
def test_no_token_is_drawn_and_the_other_rows_are_exact(samplers, kind, case, bad):
    """A row of NaN gave a token in silence: the last id where compiled, the first that is no number in torch."""
    logits, specs = case
    broken = logits.clone()
    for row in bad:
        KINDS[kind](broken[row])
    for name, draw in samplers.items():
        whole, taken = draw(logits, specs), draw(broken, specs)
        for row, (expected, found) in enumerate(zip(whole, taken, strict=True)):
            assert found == ((NO_TOKEN, None) if row in bad else expected), (name, row)


def test_plainly_greedy_rows_are_told_apart_too(samplers):
    logits = torch.zeros(3, VOCAB)
    logits[0, 7] = logits[2, 9] = 1.0
    logits[1, 3] = NAN
    for name, draw in samplers.items():
        assert [token_id for token_id, _ in draw(logits, [GREEDY] * 3)] == [7, NO_TOKEN, 9], name


def test_a_row_whose_ids_are_all_banned_draws_nothing(samplers):
    spec = SampleSpec(SamplingParams(seed=3), 0, tuple(range(VOCAB)))
    for name, draw in samplers.items():
        assert draw(torch.zeros(1, VOCAB), [spec]) == [(NO_TOKEN, None)], name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_that_is_no_number_costs_its_own_sequence_and_no_other_of_the_step(make_runner, dtype):
    """(1) Two prompts are computed. (2) A block of the first is overwritten. (3) Both decode in one step."""
    runner = make_runner("tiny", dtype=dtype)
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, seed=5, top_p=0.9)]
    prompts = [tuple(range(5, 25)), tuple(range(30, 48))]
    tables = [(BlockId(1), BlockId(2)), (BlockId(3), BlockId(4))]

    def step(start: int | None, first: int | None = None) -> list[int]:
        slices = []
        for i, prompt in enumerate(prompts):
            ids, begin = (prompt, 0) if start is None else ((first,), len(prompt))
            slices.append(SequenceSlice(SeqId(i), begin, ids, (tables[i],), (SampleSpec(params[i], 0),)))
        return [token_id for token_id, _ in runner.execute(StepPlan(tuple(slices)))]

    assert NO_TOKEN not in step(None)
    whole = step(1, 7)
    runner.kv.caches[0].tensor[1].fill_(NAN)
    try:
        assert step(1, 7) == [NO_TOKEN, whole[1]]
        params.reverse()
        assert step(1, 7)[0] == NO_TOKEN, "drawn instead of greedy"
    finally:
        runner.kv.caches[0].tensor[1].zero_()


BLOCK = 4


def scheduler_of(pool: BlockPools) -> Scheduler:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 40}
    return Scheduler(pool, BLOCK, eos_token_ids=(), prefix_salt=b"model", **sizes)


def collect(scheduler: Scheduler, *drawn: int):
    plan = scheduler.plan()
    assert len(plan.sampled_rows) == len(drawn)
    return scheduler.collect([(token_id, None) for token_id in drawn])


LONG = SamplingParams(max_tokens=20, ignore_eos=True)


def test_a_sequence_without_numbers_ends_alone_and_nobody_finds_its_kv():
    """Its prompt's blocks were shared from the first step on; now they are computed again by who asks for them."""
    pool = BlockPools(20)
    scheduler = scheduler_of(pool)
    prompt, other = (1,) * 9, (2,) * 9
    scheduler.add(SeqId(1), RequestSpec(prompt, LONG), kind=SequenceKind.LOCAL)
    scheduler.add(SeqId(2), RequestSpec(other, LONG), kind=SequenceKind.LOCAL)
    collect(scheduler, 5, 5)
    outcome = collect(scheduler, NO_TOKEN, 6)
    assert outcome.failed == (1,)
    assert [(token.seq_id, token.token_id) for token in outcome.tokens] == [(2, 6)]
    scheduler.check_invariants()
    asked = enumerate((prompt, other))
    again = [scheduler.reserve(SeqId(3 + i), RequestSpec(ids, LONG), local_prefill=True) for i, ids in asked]
    assert [room.hits for room in again] == [0, 2]
    scheduler.check_invariants()


def test_a_lent_prompt_without_numbers_keeps_its_leases_blocks_until_they_come_back():
    pool = BlockPools(20)
    scheduler = scheduler_of(pool)
    scheduler.add(SeqId(1), RequestSpec((1,) * 36, LONG), kind=SequenceKind.LENT)
    assert collect(scheduler).advanced == ((1, 32),)
    outcome = collect(scheduler, NO_TOKEN)
    assert (outcome.failed, outcome.tokens, outcome.advanced) == ((1,), (), ())
    assert pool.counts().held == 9, "a reader may still read them"
    scheduler.return_lease(SeqId(1))
    assert pool.num_free == 20, "none stays cached"
    scheduler.check_invariants()


def test_one_that_was_aborted_during_the_step_is_not_told_of_again():
    pool = BlockPools(20)
    scheduler = scheduler_of(pool)
    scheduler.add(SeqId(1), RequestSpec((1,) * 9, LONG), kind=SequenceKind.LOCAL)
    collect(scheduler, 5)
    scheduler.plan()
    scheduler.abort(SeqId(1))
    outcome = scheduler.collect([(NO_TOKEN, None)])
    assert (outcome.failed, outcome.tokens) == ((), ())
    scheduler.check_invariants()
