"""Requests served by a runner through one scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind

Request = tuple[tuple[int, ...], SamplingParams]
"""A prompt and the way to sample its output."""


def serve(
    runner: ModelRunner, requests: Sequence[Request], *, blocks: int, budget: int, eos_token_ids: tuple[int, ...] = (2,)
) -> tuple[list[list[int]], int]:
    """Serve all requests at once. Return their outputs, and how often one was preempted.

    blocks: those of each KV group.
    """
    groups = runner.kv.spec.groups
    pool = BlockPools(*(blocks for _ in groups), layouts=groups)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": budget, "max_model_len": blocks * runner.kv.spec.block_size}
    scheduler = Scheduler(pool, runner.kv.spec.block_size, **limits, eos_token_ids=eos_token_ids)
    for number, (prompt, params) in enumerate(requests):
        scheduler.add(SeqId(number), RequestSpec(prompt, params), kind=SequenceKind.LOCAL)
    outputs: list[list[int]] = [[] for _ in requests]
    preempted = 0
    while scheduler.has_work:
        outcome = scheduler.collect(runner.execute(scheduler.plan()))
        preempted += len(outcome.preempted)
        for token in outcome.tokens:
            outputs[token.seq_id].append(token.token_id)
    scheduler.check_invariants()
    assert pool.num_free == pool.num_blocks
    return outputs, preempted
