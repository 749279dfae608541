"""The cases to measure, and the timing of one run. Standard library only, because every engine's own Python imports this."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

CONTEXT: Final = 128
LONG: Final = 2048
AT_LEAST_S: Final = 0.2  # one figure is the mean of runs that take this long together


@dataclass(frozen=True)
class Case:
    """One step: `batch` sequences with `tokens` new tokens each, after `cached` tokens whose KV exists."""

    name: str
    batch: int
    tokens: int
    cached: int

    @property
    def step_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.batch * self.tokens


CASES: Final = (
    Case("prefill 512", 1, 512, 0),
    Case("prefill 2048", 1, LONG, 0),
    *(Case(f"decode B={batch}", batch, 1, CONTEXT) for batch in (1, 8, 32, 64)),
    Case("decode B=32 at 2048", 32, 1, LONG - 1),
)


def mean_s(work: Callable[[], Any], *, at_least_s: float = AT_LEAST_S, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the mean seconds of a run by `clock`, over runs that take `at_least_s` together."""
    runs, began_s = 0, clock()
    while True:
        work()
        runs += 1
        elapsed_s = clock() - began_s
        if elapsed_s >= at_least_s:
            return elapsed_s / runs
