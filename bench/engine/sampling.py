"""Measures the time from a row of logits to a token, against the time to read the row once and against transformers.

    python -m bench.engine.sampling [--model default] [--rounds 5]

The rows are the model's own logits over a text. The figures are CPU time of one thread, including packing and results in
Python. They are medians over rounds in which our code and the peer take turns. The peer does what transformers' `generate`
does with a batch: its logits processors and warpers, then softmax and `torch.multinomial`. It has no presence and frequency
penalties and no seed for each row. The floor is the time to read the logits once at the best memory rate of this thread in
this run. Logits that a step has just written may still be in a cache, which is faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.sampling import SamplingParams, edits_of
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.runner import ModelRunner
from pdserve.engine.sampler import sample
from pdserve.text.tokenizer import Tokenizer

BATCHES: Final = (1, 64, 256)
TEXT: Final = (
    "The sea was calm that morning, and the fishermen had gone out early. By noon the wind had turned; by evening nobody on "
    "the shore could see the boats any more, and the lamp in the old tower was lit an hour before its time. "
) * 8
OUTPUT: Final = 300  # output ids before the row, which penalties count


@dataclass(frozen=True)
class Kind:
    """One way of sampling: its name, our parameters, and the peer's processors."""

    name: str
    params: dict[str, Any]
    peer: Callable[[], list[Any]]
    """Function that makes transformers' processors for the same sampling. They keep state, so each run needs new ones."""


FILTERS: Final = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
PENALTIES: Final = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
KINDS: Final = (
    Kind("greedy", {"temperature": 0.0}, list),
    Kind("temperature", {"temperature": 0.8}, lambda: [TemperatureLogitsWarper(0.8)]),
    Kind("top-k 50", {"top_k": 50}, lambda: [TopKLogitsWarper(50)]),
    Kind("top-p 0.95", {"top_p": 0.95}, lambda: [TopPLogitsWarper(0.95)]),
    Kind(
        "everything",
        {**FILTERS, **PENALTIES},
        lambda: [
            RepetitionPenaltyLogitsProcessor(1.1),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(50),
            TopPLogitsWarper(0.95),
            MinPLogitsWarper(0.02),
        ],
    ),
    Kind("logprobs 5, greedy", {"temperature": 0.0, "logprobs": 5}, list),
)


def logits_of(runner: ModelRunner, directory: Any, rows: int) -> tuple[Tensor, list[int]]:
    """Return the logits of the first `rows` places of the text, [rows, vocab], and the ids of the whole text."""
    ids = Tokenizer.load(directory).encode(TEXT)
    assert len(ids) >= rows, "the text is too short"
    blocks = tuple(BlockId(i) for i in range(runner.kv.spec.blocks_for(len(ids))))
    return runner.logits(StepPlan((SequenceSlice(SeqId(0), 0, tuple(ids), (blocks,), ()),)))[:rows].clone(), ids


def specs_of(kind: Kind, ids: list[int], rows: int) -> list[SampleSpec]:
    """Return a specification for each row, after OUTPUT output tokens that are the first ids of the text."""
    specs = []
    for i in range(rows):
        params = SamplingParams(max_tokens=OUTPUT + 1, seed=i, **kind.params)
        edits = edits_of(params, 0)
        if edits is not None:
            edits.catch_up(ids[:OUTPUT])
        specs.append(SampleSpec(params, OUTPUT, (), edits))
    return specs


def ours(runner: ModelRunner, specs: list[SampleSpec], logits: Tensor) -> Any:
    """Draw a token for each row with our sampler, compiled if the runner's model has it."""
    model: Any = runner._model
    rows = list(range(len(specs)))
    if hasattr(
        model, "_sample"
    ):  # a real step has already found the tokens of greedy rows; here this search is part of the cost
        return model._sample(logits, rows, specs)
    return sample(logits, specs)


def peer(kind: Kind, ids: Tensor, logits: Tensor) -> Any:
    """Draw a token for each row as transformers does."""
    if kind.params.get("logprobs"):
        told = logits.log_softmax(-1)
        chosen = logits.argmax(-1)
        return (
            chosen.tolist(),
            told.gather(-1, chosen[:, None]).tolist(),
            [x.tolist() for x in told.topk(kind.params["logprobs"])],
        )
    if kind.params.get("temperature") == 0.0:
        return logits.argmax(-1).tolist()
    scores: Any = LogitsProcessorList(kind.peer())(ids, logits)  # type: ignore[arg-type]
    return torch.multinomial(scores.softmax(-1), 1)[:, 0].tolist()


def cpu_s(work: Callable[[Tensor], Any], logits: Tensor) -> float:
    """Return the CPU seconds of one run on a fresh copy of the logits, since penalties change them."""
    fresh = logits.clone()
    began_s = time.thread_time()
    work(fresh)
    return time.thread_time() - began_s


def read_s(size_bytes: int) -> float:
    """Return the seconds to read `size_bytes` uncached bytes, from the best of twenty reads of 128 MiB."""
    data = torch.ones(32 * MIB)
    best_s = float("inf")
    for _ in range(20):
        began_s = time.thread_time()
        data.sum()
        best_s = min(best_s, time.thread_time() - began_s)
    return best_s * size_bytes / data.nbytes


def compare(runner: ModelRunner, kind: Kind, logits: Tensor, ids: list[int], rounds: int) -> tuple[float, float]:
    """Return the median seconds for a row: (ours, the peer's)."""
    rows = len(logits)
    specs = specs_of(kind, ids, rows)
    given = torch.tensor([ids[:OUTPUT]]).expand(rows, -1)
    times_s: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 1):  # the first warms up
        repeats = max(1, 8 // rows)
        times_s[0].append(min(cpu_s(lambda x: ours(runner, specs, x), logits) for _ in range(repeats)))
        times_s[1].append(min(cpu_s(lambda x: peer(kind, given, x), logits) for _ in range(repeats)))
    return statistics.median(times_s[0][1:]) / rows, statistics.median(times_s[1][1:]) / rows


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory = resolve(options.model)
    card = ModelCard.load(directory)
    config = EngineConfig(model=options.model, dtype="bfloat16", kv_cache_memory=64 * MIB, threads=1)
    runner = ModelRunner.load(directory, card, config)
    logits, ids = logits_of(runner, directory, max(BATCHES))
    floor_s = read_s(card.vocab_size * 4)
    table = Table(title=f"us a row of {card.vocab_size} logits, one thread; floor: reading it once, {floor_s * 1e6:.1f}")
    table.add_column("")
    for batch in BATCHES:
        for name in (f"B={batch} ours", "peer", "peer / ours", "ours / floor"):
            table.add_column(name, justify="right")
    for kind in KINDS:
        cells = []
        for batch in BATCHES:
            ours_s, peer_s = compare(runner, kind, logits[:batch], ids, options.rounds)
            cells += [f"{ours_s * 1e6:.1f}", f"{peer_s * 1e6:.1f}", f"{peer_s / ours_s:.1f}", f"{ours_s / floor_s:.1f}"]
        table.add_row(kind.name, *cells)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
