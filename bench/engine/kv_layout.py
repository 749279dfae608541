"""Compares two KV layouts: a block as one run of bytes for all layers, and a pool for each layer.

    python -m bench.engine.kv_layout [--blocks 256] [--runs 9] [--batch 8] [--context 2048]

The wire: NIXL reads scattered blocks between two processes, with one descriptor for each block or with one for each layer's K
and V; the bytes are the same. Attention: decode steps of the compiled and of the torch model read one pool, in which the layers
of a block follow each other, or a pool for each layer, in which the blocks of a layer follow each other. For the second layout
there is a model of one layer for each layer, each with its own pool. All models have random weights and 64 ids, so that KV is
most of the work. The time of the same step at a context of one token is subtracted, which removes all work except attention.
Times are CPU time of one thread; all ways take turns.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Final
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from bench.transfer.reads import SEED, Pool, TransportWay
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families.llama import llama_layers
from pdserve.checkpoint.resolve import resolve
from pdserve.config import EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import KvGroup, ceil_div
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.models import native_decoder as native
from pdserve.engine.models.weights import DenseWeights, GqaWeights, LayerWeights, ModelWeights
from pdserve.engine.native import library
from pdserve.engine.runner import ModelRunner

BLOCK_SIZE: Final = 16
VOCAB: Final = 64
GREEDY: Final = SampleSpec(SamplingParams(temperature=0.0), 0)


def wire(layout: KvGroup, blocks: int, runs: int) -> dict[str, list[float]]:
    """Return the seconds of each run, by layout. The bytes of every read are compared."""
    pieces = 2 * layout.num_layers
    order = [int(block) for block in np.random.default_rng(SEED).permutation(blocks)]
    split = [piece * blocks + block for block in order for piece in range(pieces)]  # a pool for each layer's K and V
    with ExitStack() as stack:
        ways = {}
        for name, count, size, wanted in (
            ("one run a block", blocks, layout.block_bytes, order),
            (f"{pieces} runs a block", blocks * pieces, layout.block_bytes // pieces, split),
        ):
            ways[name] = TransportWay(stack, "nixl", Pool(count, size, fill=True), wanted)
        rounds = [{name: way.run() for name, way in ways.items()} for _ in range(runs + 1)]
    return {name: [one[name] for one in rounds[1:]] for name in ways}


def random_weights(card: ModelCard, dtype: torch.dtype) -> ModelWeights:
    """Return random weights of the card's shape."""
    generator = torch.Generator().manual_seed(SEED)

    def matrix(out_features: int, in_features: int) -> Tensor:
        return torch.randn(out_features, in_features, generator=generator).mul_(in_features**-0.5).to(dtype)

    hidden = card.spec.hidden_size
    norm = torch.ones(hidden, dtype=dtype)
    layers = tuple(
        LayerWeights(
            norm,
            GqaWeights(matrix(attention.query_width + attention.kv_width, hidden), matrix(hidden, attention.out_width)),
            norm,
            DenseWeights(matrix(2 * mlp.intermediate, hidden), matrix(hidden, mlp.intermediate)),
        )
        for attention, mlp in llama_layers(card.spec)
    )
    embedding = matrix(VOCAB, hidden)
    return ModelWeights(embedding, layers, norm, embedding)


def make_runner(card: ModelCard, blocks: int, *, compiled: bool) -> ModelRunner:
    """Return a runner with random weights and a filled pool of `blocks` blocks."""
    memory = blocks * card.kv_layout(BLOCK_SIZE, "bfloat16").block_bytes
    config = EngineConfig(dtype="bfloat16", threads=1, kv_cache_memory=memory, block_size=BLOCK_SIZE)
    with mock.patch.object(native, "supports", native.supports if compiled else lambda *_: False):
        runner = ModelRunner.make(card, config, lambda dtype, _: random_weights(card, dtype))
    runner.kv.caches[0].tensor.normal_()  # the system maps all untouched pages to one page of zeros
    return runner


def plan_of(batch: int, context: int, blocks: list[int]) -> StepPlan:
    """Return a step with one token of each sequence after `context` cached tokens, on the scattered `blocks`."""
    each = ceil_div(context + 1, BLOCK_SIZE)
    tables = (tuple(BlockId(b) for b in blocks[i * each : (i + 1) * each]) for i in range(batch))
    return StepPlan(tuple(SequenceSlice(SeqId(i), context, (7,), (table,), (GREEDY,)) for i, table in enumerate(tables)))


def attention(card: ModelCard, batch: int, context: int, runs: int, *, compiled: bool) -> dict[str, list[float]]:
    """Return the CPU seconds that the context adds to each step, by layout."""
    count = batch * ceil_div(context + 1, BLOCK_SIZE)
    order = random.Random(SEED).sample(range(count), count)
    plans = plan_of(batch, context, order), plan_of(batch, 1, order)
    alone = replace(card, spec=replace(card.spec, layers=card.spec.layers[:1]))
    ways = {
        "one run a block": [make_runner(card, count, compiled=compiled)],
        "a pool a layer": [make_runner(alone, count, compiled=compiled) for _ in card.spec.layers],
    }

    def seconds(runners: list[ModelRunner], plan: StepPlan) -> float:
        began_s = time.thread_time()
        for runner in runners:
            runner.execute(plan)
        return time.thread_time() - began_s

    rounds = [{name: [seconds(way, plan) for plan in plans] for name, way in ways.items()} for _ in range(runs + 1)]
    return {name: [long - short for long, short in (one[name] for one in rounds[1:])] for name in ways}


def add_rows(table: Table, what: str, times_s: dict[str, list[float]], total_bytes: int) -> None:
    """Add one row for each layout: median time, rate, and time relative to the first layout."""
    first = next(iter(times_s.values()))
    for name, values in times_s.items():
        median_s = statistics.median(values)
        against = statistics.median(b / a for a, b in zip(first, values, strict=True))
        table.add_row(what, name, f"{median_s * 1e3:.1f}", f"{total_bytes / median_s / 1e9:.2f}", f"{against:.2f}")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="model whose shape is used; its weights are not")
    parser.add_argument("--blocks", type=int, default=256, help="blocks of a read over the wire")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    card = ModelCard.load(resolve(args.model))
    card = replace(card, spec=replace(card.spec, vocab_size=VOCAB, tied_head=True))
    layout = card.kv_layout(BLOCK_SIZE, "bfloat16").groups[0]
    read_bytes = args.batch * args.context * layout.bytes_per_token
    table = Table(
        "what", "layout", title=f"{card.name}, bfloat16: {layout.block_bytes // 1024} KiB a block, median of {args.runs} runs"
    )
    for column in ("ms", "GB/s", "time / one run's"):
        table.add_column(column, justify="right")
    add_rows(table, f"NIXL, {args.blocks} blocks", wire(layout, args.blocks, args.runs), args.blocks * layout.block_bytes)
    ways: list[tuple[str, Callable[[], dict[str, list[float]]]]] = [
        ("compiled", lambda: attention(card, args.batch, args.context, args.runs, compiled=True)),
        ("torch", lambda: attention(card, args.batch, args.context, args.runs, compiled=False)),
    ]
    for name, way in ways if library.load() is not None else ways[1:]:
        add_rows(table, f"decode of {args.batch} at {args.context}, {name}", way(), read_bytes)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
