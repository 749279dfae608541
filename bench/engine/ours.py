"""Times our engine's steps in this process, for the comparison with other engines."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from bench.engine.peers.cases import CASES, Case, mean_s
from pdserve.checkpoint.card import ModelCard
from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.runner import ModelRunner

POOL_TOKENS: Final = max(case.batch * (case.cached + case.tokens) for case in CASES) + 16 * 64
GREEDY: Final = SamplingParams(temperature=0.0)
BUDGET: Final = EngineConfig().limits("cpu", "prefill").max_num_batched_tokens


class OurEngine:
    """A runner with one setting. Its times do not include scheduling, which takes well under a twentieth of a step."""

    def __init__(self, directory: Path, card: ModelCard, threads: int, quantization: str | None) -> None:
        """Load the runner. Raises `ConfigError` when the setting does not run here."""
        memory = POOL_TOKENS * card.kv_layout(16, "bfloat16").bytes_per_token
        config = EngineConfig(dtype="bfloat16", threads=threads, kv_cache_memory=memory, quantization=quantization)
        self.runner = ModelRunner.load(directory, card, config)
        self._vocab = card.vocab_size
        self._warm: set[str] = set()
        # The system maps all unwritten pages to one page of zeros, which would be read from the nearest cache.
        for cache in self.runner.kv.caches:
            cache.blocks.view(torch.int16).fill_(0x3C00)
        gc.collect()
        gc.freeze()  # as a worker does, so that no step pays for a walk over all loaded objects

    def seconds(self, case: Case) -> float:
        """Return the mean seconds of the case's step. The first call of a case also warms up."""
        step = self._step(case)
        if case.name not in self._warm:
            self._warm.add(case.name)
            step()
        return mean_s(step)

    def _step(self, case: Case) -> Callable[[], Any]:
        """Return a function that executes the case."""
        plans = self.plans(case)
        return lambda: [self.runner.execute(plan) for plan in plans]

    def plans(self, case: Case) -> list[StepPlan]:
        """Return the steps of a case. A prompt is computed in the chunks that the scheduler would make."""
        return [
            StepPlan(tuple(self._slice(case, i, begin, min(begin + BUDGET, case.tokens)) for i in range(case.batch)))
            for begin in range(0, case.tokens, BUDGET)
        ]

    def _slice(self, case: Case, i: int, begin: int, end: int) -> SequenceSlice:
        blocks = ceil_div(case.cached + case.tokens, self.runner.kv.spec.block_size)
        table = tuple(BlockId(i * blocks + j) for j in range(blocks))
        ids = tuple((7 + 31 * i + j) % self._vocab for j in range(begin, end))
        samples = (SampleSpec(GREEDY, 0),) if end == case.tokens else ()
        return SequenceSlice(SeqId(i), case.cached + begin, ids, (table,), samples)


def load(directory: Path, card: ModelCard, threads: int) -> dict[str | None, OurEngine]:
    """Return our engines by quantization, only those that run here."""
    found: dict[str | None, OurEngine] = {}
    for quantization in (None, "int8", "int4"):
        try:
            found[quantization] = OurEngine(directory, card, threads, quantization)
        except ConfigError:
            pass  # no compiled kernels here
    return found
