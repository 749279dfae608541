"""Serves vLLM's CPU build in bfloat16 by its offline `LLM`: a step is one `step` of its engine, scheduler included.

    python -m bench.engine.peers.vllm_server DIRECTORY THREADS

Every prompt that is timed begins with unique tokens, so prefix caching finds nothing. Prefix caching only saves decode cases
from computing their prompts again. A decode case advances by one token in each step, by a few dozen at most in a turn.
"""

from __future__ import annotations

import itertools
import sys

import vllm
from vllm import LLM, SamplingParams

from bench.engine.peers.cases import LONG, Case, mean_s
from bench.engine.peers.protocol import Timer, serve

MOST_TOKENS = LONG + 512


def start() -> tuple[str, Timer]:
    """Load the model; see `serve`."""
    llm = LLM(
        sys.argv[1], dtype="bfloat16", skip_tokenizer_init=True, max_model_len=MOST_TOKENS, max_num_seqs=64,
        max_num_batched_tokens=LONG, enable_prefix_caching=True, disable_log_stats=True,
    )  # fmt: skip
    timing = _Timing(llm)
    return f"vLLM {vllm.__version__}", timing


class _Timing:
    def __init__(self, llm: LLM) -> None:
        self._engine = llm.llm_engine
        self._names = itertools.count()
        self._warm: set[str] = set()

    def __call__(self, case: Case) -> float:
        one = self._decode if case.cached else self._prefill
        if case.name not in self._warm:
            one(case)
            self._warm.add(case.name)
        return one(case)

    def _add(self, number: int, tokens: int, outputs: int) -> str:
        name = str(next(self._names))
        ids = [100 + number % 1000, 100 + number // 1000 % 1000, *(100 + j % 9000 for j in range(tokens - 2))]
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": ids}, params)
        return name

    def _prefill(self, case: Case) -> float:
        def whole() -> None:
            self._add(1000 + next(self._names), case.tokens, 1)
            while self._engine.has_unfinished_requests():
                self._engine.step()

        return mean_s(whole)

    def _decode(self, case: Case) -> float:
        names = [self._add(number, case.cached, MOST_TOKENS - case.cached) for number in range(case.batch)]
        try:
            running: set[str] = set()
            while len(running) < case.batch:
                running |= {output.request_id for output in self._engine.step()}
            self._engine.step()
            return mean_s(self._engine.step)
        finally:
            self._engine.abort_request(names)
            while self._engine.has_unfinished_requests():
                self._engine.step()


if __name__ == "__main__":
    serve(start)
