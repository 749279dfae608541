"""The counts of steps: they are the sums over single tokens, and they begin anew with each life of a worker."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from pdserve.core.block_pools import BlockPools
from pdserve.core.blocks import BlockCounts
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.roofline import (
    COUNTED,
    EXPERT_STEPS,
    LayerShape,
    ModelShape,
    StepCounts,
    StepFlops,
    StepTraffic,
    dense_mlp,
    gqa_attention,
    since,
)
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import GREEDY, ONE_GREEDY, SequenceSlice, StepPlan
from pdserve.core.worker import ExpertLoad, WorkerLoad
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.worker.engine_thread import EngineSteps
from pdserve.worker.messages import Activate, AddLent, Reserve

SHAPE = ModelShape(100, 64, ((LayerShape(gqa_attention(64, 4, 2, 16, 16), dense_mlp(64, 128)), 3),), True)
FLOPS, TRAFFIC = StepFlops.of(SHAPE), StepTraffic.of(SHAPE, weight_bits=16, kv_bits=16)
STARTS = st.lists(st.integers(1, 500), max_size=6)
CHUNKS = st.lists(st.tuples(st.integers(0, 500), st.integers(2, 40), st.integers(0, 1)), max_size=3)


def piece(start: int, tokens: int, rows: int) -> SequenceSlice:
    samples = ONE_GREEDY if rows == 1 else (GREEDY,) * rows
    return SequenceSlice(SeqId(1), start, (0,) * tokens, (), samples)


@given(STARTS, CHUNKS)
def test_a_step_with_prompts_counts_the_operations_of_all_its_tokens(
    starts: list[int], chunks: list[tuple[int, int, int]]
) -> None:
    counts = StepCounts(FLOPS, TRAFFIC)
    plan = StepPlan((*[piece(start, 1, 1) for start in starts], *[piece(*one) for one in chunks]), len(starts))
    counts.add(plan, prompt_tokens=5, output_tokens=2, step_s=0.5)
    single = sum(FLOPS.chunk(at, 1, 1) for at in starts)
    single += sum(FLOPS.chunk(at, 1) for start, tokens, _ in chunks for at in range(start, start + tokens))
    single += sum(rows for _, _, rows in chunks) * FLOPS.row
    assert counts.prompt_flops == single
    assert (counts.computed_prompt_tokens, counts.output_tokens, counts.prompt_busy_s) == (5, 2, 0.5)
    assert (counts.prompt_steps, counts.decode_steps) == (1, 0)
    assert counts.decode_busy_s == counts.decode_read_bytes == 0.0


@given(STARTS, st.lists(st.tuples(st.integers(1, 500), st.integers(2, 4)), max_size=3))
def test_a_step_of_decodes_counts_weights_once_and_the_kv_of_each(starts: list[int], drafted: list[tuple[int, int]]) -> None:
    counts = StepCounts(FLOPS, TRAFFIC)
    slices = [piece(start, 1, 1) for start in starts] + [piece(start, tokens, tokens) for start, tokens in drafted]
    counts.add(StepPlan(tuple(slices), len(starts)), prompt_tokens=0, output_tokens=3, step_s=0.25)
    kv = sum(start + 1 for start in starts) + sum(start + tokens for start, tokens in drafted)
    assert counts.decode_read_bytes == TRAFFIC.fixed + kv * SHAPE.kv_numbers * 2
    assert (counts.prompt_steps, counts.decode_steps) == (0, 1)
    assert (counts.decode_busy_s, counts.prompt_busy_s, counts.prompt_flops) == (0.25, 0.0, 0.0)


def test_the_engine_counts_prompts_by_chunks_and_every_token_drawn() -> None:
    """(1) A prompt of 10 tokens in steps of 8; (2) another sequence decodes two tokens."""
    pool = BlockPools(40)
    scheduler = Scheduler(pool, 4, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, eos_token_ids=(0,))
    steps = EngineSteps(scheduler, pool, None, StepCounts(FLOPS, TRAFFIC))
    spec = RequestSpec(tuple(range(1, 11)), SamplingParams(max_tokens=3, temperature=0.0))

    def step(*commands: object) -> WorkerLoad:
        plan, _ = steps.begin(commands)  # type: ignore[arg-type]
        sampled = [(7, None)] * len(plan.sampled_rows)
        return steps.finish(sampled, 0.5).snapshot.load  # type: ignore[union-attr]

    first = step(AddLent(SeqId(1), spec))
    assert (first.computed_prompt_tokens, first.output_tokens, first.prompt_busy_s) == (8, 0, 0.5)
    second = step()
    assert (second.computed_prompt_tokens, second.output_tokens, second.prompt_busy_s) == (10, 1, 1.0)
    assert second.prompt_flops == FLOPS.chunk(0, 10, 1)
    steps.begin([Reserve(SeqId(2), spec, local_prefill=False)])
    third = step(Activate(SeqId(2), 5))
    fourth = step()
    assert (fourth.computed_prompt_tokens, fourth.output_tokens, fourth.decode_busy_s) == (10, 3, 1.0)
    assert (fourth.prompt_steps, fourth.decode_steps) == (2, 2)
    assert third.decode_read_bytes == TRAFFIC.decodes([10])
    assert fourth.decode_read_bytes == TRAFFIC.decodes([10]) + TRAFFIC.decodes([11])


def test_a_new_life_counts_from_the_end_of_the_last_one() -> None:
    base = replace(WorkerLoad(BlockCounts(4, 4, 0, 0, 0)), **dict.fromkeys(COUNTED, 10))  # type: ignore[arg-type]
    later = replace(base, output_tokens=15, prompt_busy_s=12.5)
    assert since(later, base) == dict.fromkeys(COUNTED, 0) | {"output_tokens": 5, "prompt_busy_s": 2.5}


def test_without_a_shape_nothing_is_known_of_operations_and_bytes() -> None:
    counts = StepCounts()
    counts.add(StepPlan((piece(3, 1, 1),), 1), prompt_tokens=0, output_tokens=1, step_s=1.0)
    counts.add(StepPlan((piece(0, 4, 1),)), prompt_tokens=4, output_tokens=1, step_s=1.0)
    assert (counts.prompt_flops, counts.decode_read_bytes) == (0.0, 0.0)
    assert (counts.prompt_busy_s, counts.decode_busy_s) == pytest.approx((1.0, 1.0))


def test_the_spread_over_experts_is_taken_once_in_many_steps() -> None:
    taken: list[ExpertLoad] = []

    def take() -> ExpertLoad:
        taken.append(ExpertLoad(len(taken) + 1, 1.0, 1.0, ()))
        return taken[-1]

    counts = StepCounts(experts=take)
    for step in range(2 * EXPERT_STEPS + 1):
        counts.add(StepPlan(()), prompt_tokens=0, output_tokens=1, step_s=0.0)
        assert counts.experts is taken[step // EXPERT_STEPS]
    assert len(taken) == 3
    counts.add(StepPlan(()), prompt_tokens=0, output_tokens=1, step_s=0.0, idle=True)
    assert counts.experts is taken[3], "an idle worker tells all that it computed"
    assert StepCounts().experts is None


def test_a_worker_tells_the_spread_of_its_last_step_when_it_goes_idle() -> None:
    """Its heartbeats go on, and nothing newer would come."""
    steps_done = [0]
    pool = BlockPools(40)
    scheduler = Scheduler(pool, 4, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, eos_token_ids=(0,))
    counts = StepCounts(experts=lambda: ExpertLoad(steps_done[0], 1.0, 1.0, ()))
    steps = EngineSteps(scheduler, pool, None, counts)
    spec = RequestSpec(tuple(range(1, 21)), SamplingParams(max_tokens=2, temperature=0.0))
    commands: list[object] = [AddLent(SeqId(1), spec)]
    told = []
    while commands or scheduler.has_work:
        plan, _ = steps.begin(commands)  # type: ignore[arg-type]
        commands = []
        steps_done[0] += 1
        snapshot = steps.finish([(7, None)] * len(plan.sampled_rows)).snapshot
        assert snapshot is not None
        told.append(snapshot.load.experts.choices)  # type: ignore[union-attr]
    assert told == [1, 1, 3]
