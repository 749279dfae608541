"""Prefill in one process and decode in another, on one GPU, must give the tokens of one process that does both.

The other process computes the prompts in two chunks, draws token 0 of each and lends its pool. This process reads the blocks
into other blocks of its own by the worker's transfer thread, and decodes. Then it computes the same prompts by itself. Both
processes have the same random weights, from one seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvtransfer.api import Region, TransferDevice
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.runner import ModelRunner
from tools.gpu.other_process import other_process, say, wait
from tools.gpu.row import Row, Setup
from tools.gpu.shapes import BLOCK_SIZE, card, make_runner

KV_DTYPES = ("auto", "int8", "fp8_e4m3", "int4")


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a run: the model, its prompts, and the number of tokens of each output."""

    model: str
    prompts: tuple[int, ...]  # the number of tokens of each
    output: int

    @property
    def room(self) -> int:
        """Number of tokens for which each sequence has blocks."""
        return ceil_div(max(self.prompts) + self.output, BLOCK_SIZE) * BLOCK_SIZE

    @property
    def blocks(self) -> int:
        """Number of blocks that all sequences have together."""
        return len(self.prompts) * self.room // BLOCK_SIZE

    def tables(self, first_block: int) -> list[tuple[BlockId, ...]]:
        """Return the shuffled blocks of each sequence, from `first_block` on."""
        order = torch.randperm(self.blocks, generator=torch.Generator().manual_seed(first_block)).tolist()
        each = self.room // BLOCK_SIZE
        return [tuple(BlockId(first_block + b) for b in order[i * each : (i + 1) * each]) for i in range(len(self.prompts))]


def sizes(setup: Setup) -> Sizes:
    """Return the sizes, tiny ones for a rehearsal."""
    return Sizes("rehearsal", (5, 18), 4) if setup.rehearsed else Sizes("1b", (700, 33, 512, 1500), 64)


def params(sequence: int) -> SamplingParams:
    """Return how a sequence is sampled: every second one draws at random, the others take the likeliest token."""
    return SamplingParams(temperature=0.8, top_p=0.9, seed=sequence) if sequence % 2 else SamplingParams(temperature=0.0)


def runner_for(setup: Setup, kv_cache_dtype: str) -> ModelRunner:
    """Return a runner with blocks for all sequences twice: for what it reads, and for what it computes itself."""
    torch.manual_seed(1)
    each = sizes(setup)
    return make_runner(
        setup, card(each.model), sequences=len(each.prompts), room=each.room, pools=2, kv_cache_dtype=kv_cache_dtype
    )


def prefill(runner: ModelRunner, each: Sizes, tables: list[tuple[BlockId, ...]]) -> list[int]:
    """Compute each prompt in two chunks, the first of whole blocks, and return token 0 of each."""
    vocab = 128
    firsts = []
    for i, (length, table) in enumerate(zip(each.prompts, tables, strict=True)):
        ids = tuple((7 + 31 * i + 13 * j) % vocab for j in range(length))
        cut = length // 2 // BLOCK_SIZE * BLOCK_SIZE
        if cut:
            runner.execute(StepPlan((SequenceSlice(SeqId(i), 0, ids[:cut], (table,), ()),)))
        last = SequenceSlice(SeqId(i), cut, ids[cut:], (table,), (SampleSpec(params(i), 0),))
        firsts.append(runner.execute(StepPlan((last,)))[0][0])
    return firsts


def decode(runner: ModelRunner, each: Sizes, tables: list[tuple[BlockId, ...]], firsts: list[int]) -> list[list[int]]:
    """Return all tokens of each sequence. Each step computes all sequences in one batch."""
    tokens = [[first] for first in firsts]
    for step in range(1, each.output):
        slices = tuple(
            SequenceSlice(SeqId(i), length + step - 1, (tokens[i][-1],), (tables[i],), (SampleSpec(params(i), step),))
            for i, length in enumerate(each.prompts)
        )
        for i, (token, _) in enumerate(runner.execute(StepPlan(slices))):
            tokens[i].append(token)
    return tokens


def region_of(runner: ModelRunner) -> Region:
    """Return the runner's pool as the worker registers it."""
    kv = runner.kv.caches[0]
    return Region(
        kv.address, kv.num_blocks, kv.layout.block_bytes, TransferDevice("cuda" if kv.device.type == "cuda" else "cpu")
    )


def lend(setup: Setup) -> None:
    """Run the other process, which lends a pool for each dtype of KV."""
    from tools.gpu import reader

    each, kept = sizes(setup), []
    for number, kv_cache_dtype in enumerate(KV_DTYPES):
        runner = runner_for(setup, kv_cache_dtype)
        firsts = prefill(runner, each, each.tables(0))
        region = region_of(runner)
        transport = reader.lend(region, number)
        kept.append((runner, transport))
        say(**reader.described(transport, region, number), firsts=firsts)
    wait()
    for _, transport in kept:
        transport.close()


def run(setup: Setup) -> None:
    """Compare the tokens for each dtype of KV. Raises `SystemExit` with the dtypes for which they differ."""
    each, wrong = sizes(setup), []
    with other_process(setup, "prefill-side") as said:
        for kv_cache_dtype in KV_DTYPES:
            runner = runner_for(setup, kv_cache_dtype)
            found, expected = handed_over(runner, each, next(said)), by_itself(runner, each)
            total = len(each.prompts) * each.output
            equal = sum(a == b for ours, own in zip(found, expected, strict=True) for a, b in zip(ours, own, strict=True))
            case = f"{len(each.prompts)} prompts, KV {kv_cache_dtype}, two processes"
            Row("handoff", case, f"{equal} of {total} tokens", "one process").emit()
            if equal < total:
                wrong.append(kv_cache_dtype)
    if wrong:
        raise SystemExit(f"other tokens after a handoff than without: KV {', '.join(wrong)}")


def handed_over(runner: ModelRunner, each: Sizes, lent: dict[str, Any]) -> list[list[int]]:
    """Read the KV that the other process has computed, and decode."""
    from tools.gpu import reader

    theirs, ours = each.tables(0), each.tables(each.blocks)
    counts = [ceil_div(length, BLOCK_SIZE) for length in each.prompts]
    remote = [block for table, count in zip(theirs, counts, strict=True) for block in table[:count]]
    local = [block for table, count in zip(ours, counts, strict=True) for block in table[:count]]
    reader.read_all(region_of(runner), lent, remote, local)
    return decode(runner, each, ours, lent["firsts"])


def by_itself(runner: ModelRunner, each: Sizes) -> list[list[int]]:
    """Compute the prompts and decode, in this process alone."""
    tables = each.tables(0)
    return decode(runner, each, tables, prefill(runner, each, tables))
