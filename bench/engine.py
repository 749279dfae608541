"""How fast one engine is, beside what the machine allows and beside transformers on the same weights.

    python -m bench.engine [--threads 1] [--model default] [--rounds 5]

Prefill of 128 and 512 tokens, decode steps of 1 and 8 sequences at 128 tokens of context, bfloat16. Ours and the
peer take turns within each round, so that a busy neighbour hits both; medians over the rounds. The floor of a step
is the longer of two times: its weights and KV through measured memory bandwidth, its multiplications at the
measured peak of bfloat16 matrix products.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from bench.floors import Machine, mean_s, measure
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig
from pdserve.core.batch import SampleSpec, SequenceSlice, StepPlan
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.sampling import SamplingParams
from pdserve.engine.runner import ModelRunner

CONTEXT = 128
GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True)
class Case:
    """One step: `batch` sequences of `tokens` new tokens behind `cached` ones."""

    name: str
    batch: int
    tokens: int
    cached: int

    @property
    def step_tokens(self) -> int:
        return self.batch * self.tokens


CASES = (
    Case("prefill 128", 1, 128, 0),
    Case("prefill 512", 1, 512, 0),
    Case("decode B=1", 1, 1, CONTEXT),
    Case("decode B=8", 8, 1, CONTEXT),
)


def floor_s(case: Case, machine: Machine, card: ModelCard, runner: ModelRunner) -> float:
    """Weights once; KV of all tokens written or read once; two operations a weight and token, the head once a sequence."""
    kv_bytes = case.batch * (case.cached + case.tokens) * runner.kv.layout.bytes_per_token
    head = card.vocab_size * card.hidden_size
    embeddings = head if card.tie_word_embeddings else 2 * head
    layers = runner.weights_bytes // 2 - embeddings
    scores = case.batch * case.tokens * (case.cached + case.tokens / 2) * card.num_layers * card.num_heads * card.head_dim * 2
    operations = 2 * (layers * case.step_tokens + head * case.batch + scores)
    return max((2 * (layers + head) + kv_bytes) / machine.read_bytes_s, operations / machine.bf16_flops_s)


def our_step(case: Case, runner: ModelRunner, vocab_size: int) -> Callable[[], Any]:
    blocks = ceil_div(case.cached + case.tokens, runner.kv.layout.block_size)
    slices = []
    for i in range(case.batch):
        table = tuple(BlockId(i * blocks + j) for j in range(blocks))
        ids = tuple((7 + 31 * i + j) % vocab_size for j in range(case.tokens))
        slices.append(SequenceSlice(SeqId(i), case.cached, ids, table, SampleSpec(GREEDY, 0)))
    plan = StepPlan(tuple(slices))
    return lambda: runner.execute(plan)


def peer_step(case: Case, model: Any) -> Callable[[], Any]:
    """The same work in transformers: logits of the last position only, the cache cut back after a step."""
    cache = DynamicCache(config=model.config)
    if case.cached:
        with torch.inference_mode():
            model(torch.full((case.batch, case.cached), 7), past_key_values=cache, use_cache=True, logits_to_keep=1)
    ids = torch.full((case.batch, case.tokens), 7)

    def step() -> Any:
        with torch.inference_mode():
            held = cache if case.cached else DynamicCache(config=model.config)
            logits = model(ids, past_key_values=held, use_cache=True, logits_to_keep=1).logits
            if case.cached:
                held.crop(-case.tokens)
            return logits.argmax(-1)

    return step


def load(directory: Path, card: ModelCard, threads: int) -> tuple[ModelRunner, Any]:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    config = EngineConfig(dtype="bfloat16", threads=threads, kv_cache_memory=128 * MIB)
    return ModelRunner.load(directory, card, config), model.eval()


def run(directory: Path, threads: int, rounds: int) -> Table:
    card = ModelCard.load(directory)
    runner, model = load(directory, card, threads)
    machine = measure(threads)
    steps = {case: (our_step(case, runner, card.vocab_size), peer_step(case, model)) for case in CASES}
    times: dict[Case, tuple[list[float], list[float]]] = {case: ([], []) for case in CASES}
    for pair in steps.values():
        for step in pair:
            step()  # warm up
    for _ in range(rounds):
        for case, pair in steps.items():
            for step, found in zip(pair, times[case], strict=True):
                found.append(mean_s(step))
    title = (
        f"{card.name}, bfloat16, {threads} thread(s): "
        f"memory {machine.read_bytes_s / 1e9:.0f} GB/s, products {machine.bf16_flops_s / 1e9:.0f} GFLOP/s"
    )
    table = Table("step", "ms", "tokens/s", "floor tokens/s", "of floor", "transformers tokens/s", "against it", title=title)
    for case, (ours, peers) in times.items():
        own, peer = statistics.median(ours), statistics.median(peers)
        floor = floor_s(case, machine, card, runner)
        rates = [case.step_tokens / s for s in (own, floor, peer)]
        cells = [f"{own * 1e3:.1f}", f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{floor / own:.0%}", f"{rates[2]:,.0f}"]
        table.add_row(case.name, *cells, f"{peer / own:.2f} x")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    Console(width=120).print(run(resolve(args.model), args.threads, args.rounds))


if __name__ == "__main__":
    main()
