"""Serves OpenVINO GenAI by its `ContinuousBatchingPipeline`: a step is one `step` of the pipeline, scheduler included.

    python -m bench.engine.peers.openvino_server FOLDER THREADS

Every prompt that is timed begins with unique tokens, so prefix caching finds nothing. Prefix caching only saves decode cases
from computing their prompts again. A decode case advances by one token in each step.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, Final

import numpy as np
import openvino
import openvino_genai

from bench.engine.peers.cases import LONG, Case, mean_s
from bench.engine.peers.protocol import Timer, serve

MOST_TOKENS: Final = LONG + 512
MOST_STEPS: Final = 10_000  # one case needs a few hundred steps; a sequence that never runs must not hold the benchmark


def start() -> tuple[str, Timer]:
    """Load the model; see `serve`."""
    folder, threads = sys.argv[1:]
    limits = openvino_genai.SchedulerConfig()
    limits.max_num_batched_tokens, limits.max_num_seqs = LONG, 64
    limits.cache_size, limits.enable_prefix_caching = 2, True  # GiB, for the longest case
    settings = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": int(threads), "ENABLE_CPU_PINNING": True}
    pipeline = openvino_genai.ContinuousBatchingPipeline(folder, limits, "CPU", settings)
    return f"OpenVINO GenAI {openvino_genai.__version__}", _Timing(pipeline)


class _Timing:
    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._names = itertools.count()
        self._warm: set[str] = set()

    def __call__(self, case: Case) -> float:
        one = self._decode if case.cached else self._prefill
        if case.name not in self._warm:
            one(case)
            self._warm.add(case.name)
        return one(case)

    def _add(self, number: int, tokens: int, outputs: int) -> Any:
        ids = [100 + number % 1000, 100 + number // 1000 % 1000, *(100 + j % 9000 for j in range(tokens - 2))]
        wanted = openvino_genai.GenerationConfig(max_new_tokens=outputs, ignore_eos=True)
        prompt = openvino.Tensor(np.array([ids], dtype=np.int64))
        return self._pipeline.add_request(next(self._names), prompt, wanted)

    def _finish(self) -> None:
        for _ in range(MOST_STEPS):
            if not self._pipeline.has_non_finished_requests():
                return
            self._pipeline.step()
        raise RuntimeError(f"sequences still run after {MOST_STEPS} steps")

    def _prefill(self, case: Case) -> float:
        def whole() -> None:
            handle = self._add(1000 + next(self._names), case.tokens, 1)
            self._finish()
            assert handle.can_read(), "a prompt was not computed"

        return mean_s(whole)

    def _decode(self, case: Case) -> float:
        handles = [self._add(number, case.cached, MOST_TOKENS - case.cached) for number in range(case.batch)]
        try:
            waiting = list(handles)
            for _ in range(MOST_STEPS):
                if not waiting:
                    break
                self._pipeline.step()
                waiting = [handle for handle in waiting if not handle.can_read()]
            assert not waiting, "a sequence never ran"
            self._pipeline.step()
            seconds = mean_s(self._pipeline.step)
            assert self._pipeline.get_metrics().scheduled_requests == case.batch, "a step did not compute all sequences"
            return seconds
        finally:
            for handle in handles:
                handle.stop()
            self._finish()


if __name__ == "__main__":
    serve(start)
