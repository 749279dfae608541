"""Measures the cost of batch invariance: a step whose bits depend only on each sequence, against the ordinary step.

    python -m bench.engine.invariance [--threads 1] [--model default] [--rounds 9]

The ways are float32 and bfloat16 by torch, and bfloat16 and int8 by the compiled step, which is the same code in both modes.
The two modes take turns within each round, so that other work on the machine slows both. The cost is the median of the
rounds' ratios. With one thread, CPU time of that thread is measured instead of wall-clock time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.errors import ConfigError
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.models import native_decoder as native
from pdserve.engine.native import library
from pdserve.engine.runner import ModelRunner

AT_LEAST_S: Final = 0.15  # a measurement repeats steps until they take this long
CONTEXT: Final = 128  # cached tokens of a decode
ANY_VOCAB: Final = 500  # ids below it are in every vocabulary
CASES: Final = {
    "decode B=1": (1, 1, CONTEXT),
    "decode B=8": (8, 1, CONTEXT),
    "decode B=32": (32, 1, CONTEXT),
    "prefill 512": (1, 512, 0),
}
"""(sequences, new tokens of each, cached tokens of each), by name of the step."""


@dataclass(frozen=True)
class Way:
    """One way of computing. goal: the most time of the invariant step, as a multiple of the ordinary step's; None means no
    goal."""

    name: str
    compiled: bool
    config: EngineConfig
    goal: float | None


def ways(threads: int) -> tuple[Way, ...]:
    """Return the ways to compare."""
    plain = EngineConfig(kv_cache_memory=512 * MIB, threads=threads)
    return (
        Way("float32, torch", False, replace(plain, dtype="float32"), 1.5),
        Way("bfloat16, torch", False, replace(plain, dtype="bfloat16"), None),
        Way("bfloat16, compiled", True, replace(plain, dtype="bfloat16"), 1.1),
        Way("int8, compiled", True, replace(plain, dtype="bfloat16", quantization="int8"), 1.1),
    )


def step(runner: ModelRunner, batch: int, tokens: int, cached: int) -> Callable[[], Any]:
    """Return a function that executes one greedy step. The step draws a token for each sequence, as the scheduler plans it."""
    blocks = ceil_div(cached + tokens, runner.kv.spec.block_size)
    spec = SampleSpec(SamplingParams(temperature=0.0), 0)
    slices = []
    for i in range(batch):
        table = tuple(BlockId(i * blocks + j) for j in range(blocks))
        ids = tuple((7 + 31 * i + j) % ANY_VOCAB for j in range(tokens))
        slices.append(SequenceSlice(SeqId(i), cached, ids, (table,), (spec,)))
    plan = StepPlan(tuple(slices))
    return lambda: runner.execute(plan)


def mean_s(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    """Return the mean seconds of one call of `work`, over calls that take AT_LEAST_S together."""
    runs, began_s = 0, clock()
    while (elapsed_s := clock() - began_s) < AT_LEAST_S or not runs:
        work()
        runs += 1
    return elapsed_s / runs


def load(directory: Path, card: ModelCard, way: Way) -> tuple[ModelRunner, ModelRunner]:
    """Load the ordinary engine and the invariant engine. Raises `ConfigError` when this machine cannot compute this way."""
    if way.compiled and library.load() is None:
        raise ConfigError("no compiled kernels here")
    with mock.patch.object(native, "supports", native.supports if way.compiled else lambda *_: False):
        ordinary, invariant = (
            ModelRunner.load(directory, card, replace(way.config, batch_invariant=mode)) for mode in (False, True)
        )
    return ordinary, invariant


def compare(
    pair: tuple[ModelRunner, ModelRunner], rounds: int, clock: Callable[[], float]
) -> dict[str, list[tuple[float, float]]]:
    """Return the two times of each round, by case."""
    steps = {name: [step(runner, *shape) for runner in pair] for name, shape in CASES.items()}
    for both in steps.values():
        for one in both:
            one()  # warm up
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name, (ordinary, invariant) in steps.items():
            times[name].append((mean_s(ordinary, clock), mean_s(invariant, clock)))
    return times


def run(directory: Path, threads: int, rounds: int) -> Table:
    """Measure all ways and return the table of results."""
    card = ModelCard.load(directory)
    clock = time.thread_time if threads == 1 else time.perf_counter
    table = Table("way", "step", title=f"{card.name}, {threads} thread(s), median of {rounds} interleaved rounds")
    for column in ("ordinary ms", "invariant ms", "invariant / ordinary", "goal"):
        table.add_column(column, justify="right")
    for way in ways(threads):
        try:
            pair = load(directory, card, way)
        except ConfigError as exc:
            table.add_row(way.name, str(exc))
            continue
        for name, found in compare(pair, rounds, clock).items():
            ordinary_s, invariant_s = (statistics.median(one) for one in zip(*found, strict=True))
            ratio = statistics.median(b / a for a, b in found)
            cells = (f"{ordinary_s * 1e3:.1f}", f"{invariant_s * 1e3:.1f}", f"{ratio:.2f}", f"{way.goal or ''}")
            table.add_row(way.name, name, *cells)
        del pair
        gc.collect()
    return table


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    Console(width=110).print(run(resolve(args.model), args.threads, args.rounds))


if __name__ == "__main__":
    main()
