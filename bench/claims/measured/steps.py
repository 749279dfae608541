"""Times of single steps of a runner, and a loop of the production scheduler without threads. Both take CPU time.

A runner of one compute thread computes in the thread that calls it, so other work on the machine does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import ONE_GREEDY, Sampled, SequenceSlice, StepPlan
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.scheduler import Scheduler, SequenceKind

AT_LEAST_S: Final = 0.25  # one sample is the mean of steps that take this long together
CHUNK: Final = 512  # the default budget of a step on a CPU
VOCABULARY: Final = 500  # prompts use the ids below it, which every model has


def prompt_of(tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Return a prompt of `tokens` token ids. Prompts of different seeds differ from the first token on."""
    return tuple((7 + 31 * seed + i * (1 + seed % 5)) % VOCABULARY for i in range(tokens))


class Steps:
    """The steps of one runner, timed one kind at a time."""

    def __init__(self, runner: ModelRunner) -> None:
        """Fill the KV pool, since the system would read all unwritten pages from one page of zeros."""
        self.runner = runner
        for cache in runner.kv.caches:
            cache.tensor.view(torch.uint8).fill_(0x3C)

    def decode_s(self, batch: int, context: int) -> float:
        """Return the mean CPU seconds of a step of `batch` sequences with `context` tokens each, the new token included."""
        blocks = ceil_div(context, self.runner.kv.spec.block_size)
        assert batch * blocks <= self.runner.kv.num_blocks, "the pool is too small for this batch"
        slices = [
            SequenceSlice(SeqId(i), context - 1, (7 + i % 90,), (_table(i * blocks, blocks),), ONE_GREEDY) for i in range(batch)
        ]
        plan = StepPlan(tuple(slices), batch)
        return self._mean_s(lambda: self.runner.execute(plan))

    def prefill_s(self, tokens: int, cached: int = 0) -> float:
        """Return the mean CPU seconds of a prompt of `tokens` tokens after `cached` others, in chunks like the scheduler's
        chunks."""
        plans = self.prompt_plans(prompt_of(tokens), cached)
        return self._mean_s(lambda: [self.runner.execute(plan) for plan in plans])

    def prompt_plans(self, ids: Sequence[int], cached: int = 0) -> list[StepPlan]:
        """Return the steps that compute a prompt and draw the token after it."""
        table = (_table(0, ceil_div(cached + len(ids), self.runner.kv.spec.block_size)),)
        plans = []
        for begin in range(0, len(ids), CHUNK):
            end = min(begin + CHUNK, len(ids))
            samples = ONE_GREEDY if end == len(ids) else ()
            plans.append(StepPlan((SequenceSlice(SeqId(0), cached + begin, tuple(ids[begin:end]), table, samples),)))
        return plans

    def _mean_s(self, step: Callable[[], Any]) -> float:
        step()  # it warms up
        runs, began_s = 0, time.thread_time()
        while True:
            step()
            runs += 1
            if (taken_s := time.thread_time() - began_s) >= AT_LEAST_S:
                return taken_s / runs


def _table(first: int, count: int) -> tuple[BlockId, ...]:
    return tuple(BlockId(first + i) for i in range(count))


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to serve: its prompt, and the number of tokens that it outputs."""

    prompt: tuple[int, ...]
    output_tokens: int


Admit = Callable[[int, int], int]
"""A policy of batching: from the live sequences and the most that may run to the number of sequences that join now."""


def continuous(live: int, most: int) -> int:
    """Fill each place of the batch as soon as it is free."""
    return most - live


def static(live: int, most: int) -> int:
    """Admit only into an empty batch, which is then full. Its places stay empty until its last sequence has ended."""
    return 0 if live else most


@dataclass
class Loop:
    """The production scheduler over a runner, or over no model at all where `execute` makes tokens up."""

    execute: Callable[[StepPlan], list[Sampled]]
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    budget: int = CHUNK
    salt: bytes | None = None
    outputs: dict[SeqId, list[int]] = field(default_factory=dict)
    watch: Callable[[StepPlan], None] = lambda _: None
    """Called with each plan before its step."""

    def __post_init__(self) -> None:
        self.pool = BlockPools(self.num_blocks)
        self.scheduler = Scheduler(
            self.pool,
            self.block_size,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
            eos_token_ids=(),
            prefix_salt=self.salt,
        )
        self._next = 0

    @classmethod
    def over(cls, runner: ModelRunner, max_num_seqs: int, **settings: Any) -> Loop:
        """Return a loop over a runner's model and its whole pool."""
        return cls(
            runner.execute, runner.kv.num_blocks, runner.kv.spec.block_size, runner.max_model_len, max_num_seqs, **settings
        )

    def serve(self, jobs: Sequence[Job], admit: Admit = continuous) -> float:
        """Serve all jobs to their end. Return the CPU seconds; `outputs` has the tokens, by the number of the sequence."""
        waiting, began_s = list(reversed(jobs)), time.thread_time()
        while waiting or self.scheduler.num_live:
            for _ in range(min(len(waiting), admit(self.scheduler.num_live, self.max_num_seqs))):
                self._add(waiting.pop())
            plan = self.scheduler.plan()
            assert plan.slices, "nothing runs although sequences are left: the pool is too small for one"
            self.watch(plan)
            for token in self.scheduler.collect(self.execute(plan)).tokens:
                self.outputs[token.seq_id].append(token.token_id)
        return time.thread_time() - began_s

    def _add(self, job: Job) -> None:
        seq_id = SeqId(self._next)
        self._next += 1
        self.outputs[seq_id] = []
        params = SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True)
        self.scheduler.add(seq_id, RequestSpec(job.prompt, params), kind=SequenceKind.LOCAL)
