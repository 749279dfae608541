"""Measures what structured output costs in a decode step: each sequence follows its own JSON schema, or no sequence follows a
schema.

    python -m bench.engine.constraints [--model default] [--batch 32] [--threads 1] [--steps 300]

Steps with and without constraints take turns, at 128 tokens of context. A constrained step takes the last tokens into the
grammars, computes the model, computes a mask for each sequence beside it, and draws a token of the mask. A sequence whose
grammar has ended begins it again. The table shows medians of wall time, the share of a step that constraints cost, and the
times of single masks by the clock of the thread that computes them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import GREEDY, NO_TOKEN, SampleSpec, SequenceSlice, StepPlan
from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.engine.runner import ModelRunner
from pdserve.structured.compiler import Compiler
from pdserve.structured.state import ConstraintState
from pdserve.structured.vocabulary import Vocabulary
from pdserve.text.tokenizer import Tokenizer
from testkit.random_schemas import random_schema

CONTEXT: Final = 128
WARM_UP: Final = 20  # steps that are not counted: the lexers of new grammars are cold
GREEDILY: Final = SamplingParams(temperature=0.0)


class Follower:
    """One sequence that follows a schema, again and again. It fulfils `GrammarState`, and times its masks."""

    def __init__(self, compiler: Compiler, constraint: Constraint, mask_s: list[float]) -> None:
        self._start: Callable[[], ConstraintState] = partial(compiler.start, constraint)
        self._state: ConstraintState = compiler.start(constraint)
        self._mask_s = mask_s
        self._computed = False
        self.ended = False

    @property
    def failure(self) -> str | None:
        """The reason why the grammar cannot go on."""
        return self._state.failure

    def catch_up(self, tokens: object, prompt_len: int) -> None:
        """Do nothing: `take` takes the tokens."""

    def mask(self) -> bytes | None:
        """Return the mask of the next token. Note the time of its first call for each token, which computes it."""
        if self._computed:
            return self._state.mask()
        self._computed = True
        began_s = time.thread_time()
        mask = self._state.mask()
        self._mask_s.append(time.thread_time() - began_s)
        return mask

    def take(self, token_id: int) -> None:
        """Take an output token. A grammar that has ended begins again."""
        self._computed = False
        if token_id == NO_TOKEN or not self._state.accept(token_id) or self._state.ended:
            self._state = self._start()


def plan_of(batch: int, blocks: int, grammars: list[Follower] | None) -> StepPlan:
    """Plan a decode step: each sequence computes token CONTEXT, and draws the next one."""
    slices = []
    for i in range(batch):
        spec = GREEDY if grammars is None else SampleSpec(GREEDILY, 0, grammar=grammars[i])
        table = tuple(BlockId(i * blocks + b) for b in range(blocks))
        slices.append(SequenceSlice(SeqId(i), CONTEXT, (100 + i,), (table,), (spec,)))
    return StepPlan(tuple(slices))


def measure(runner: ModelRunner, compiler: Compiler, batch: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Return the seconds of steps without and with constraints, and of single masks."""
    rng = random.Random(7)
    mask_s: list[float] = []
    schemas = [{"type": "object", "properties": {"value": random_schema(rng)}, "required": ["value"]} for _ in range(batch)]
    kind = ConstraintKind.JSON_SCHEMA
    grammars = [Follower(compiler, Constraint(kind, json.dumps(schema)), mask_s) for schema in schemas]
    blocks = runner.kv.spec.blocks_for(CONTEXT + 1)
    plain, constrained = plan_of(batch, blocks, None), plan_of(batch, blocks, grammars)
    plain_s: list[float] = []
    constrained_s: list[float] = []
    for step in track(range(WARM_UP + steps), "steps"):
        began_s = time.perf_counter()
        runner.execute(plain)
        between_s = time.perf_counter()
        for grammar, (token_id, _) in zip(grammars, runner.execute(constrained), strict=True):
            grammar.take(token_id)
        if step >= WARM_UP:
            plain_s.append(between_s - began_s)
            constrained_s.append(time.perf_counter() - between_s)
    return plain_s, constrained_s, mask_s[WARM_UP * batch :]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    directory = resolve(options.model)
    card = ModelCard.load(directory)
    config = EngineConfig(
        model=options.model, dtype="bfloat16", kv_cache_memory=512 * MIB, threads=options.threads, max_num_seqs=options.batch
    )
    runner = ModelRunner.load(directory, card, config)
    compiler = Compiler(Vocabulary(Tokenizer.load(directory), card.vocab_size, card.eos_token_ids))
    plain_s, constrained_s, mask_s = measure(runner, compiler, options.batch, options.steps)
    plain, constrained = statistics.median(plain_s), statistics.median(constrained_s)
    table = Table(
        title=f"{card.name}, {options.batch} sequences, {options.threads} thread(s), medians of {options.steps} steps"
    )
    for name in ("step, ms", "step with constraints, ms", "share of constraints", "a mask, us", "p99 of masks, us"):
        table.add_column(name, justify="right")
    ordered = sorted(mask_s)
    table.add_row(
        f"{1e3 * plain:.2f}",
        f"{1e3 * constrained:.2f}",
        f"{constrained / plain - 1:.1%}",
        f"{1e6 * statistics.median(mask_s):.0f}",
        f"{1e6 * ordered[int(0.99 * len(ordered))]:.0f}",
    )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
