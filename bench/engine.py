"""How fast one engine is, beside what the machine allows and beside transformers on the same weights.

    python -m bench.engine [--threads 2] [--model default] [--rounds 5]

Prefill of 512 and 2,048 tokens; decode steps of 1 to 64 sequences at 128 tokens of context and of 32 at 2,048; bfloat16
and int8. Ours and the peer take turns within each round, so that a busy neighbour hits both; medians over the rounds. The
floor of a step is the longer of two times: its weights and KV through measured memory bandwidth, its multiplications at
the measured peak of bfloat16 matrix products. In int8 weights take half the bytes and products of weights half the time.
Other peers (vLLM's CPU build, llama.cpp) need environments of their own and are not run here.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from pdserve.config import EngineConfig
from pdserve.core.batch import SampleSpec, SequenceSlice, StepPlan
from pdserve.core.errors import ConfigError
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
    Case("prefill 512", 1, 512, 0),
    Case("prefill 2048", 1, 2048, 0),
    *(Case(f"decode B={batch}", batch, 1, CONTEXT) for batch in (1, 8, 32, 64)),
    Case("decode B=32 at 2048", 32, 1, 2047),
)
POOL_TOKENS = 32 * 2048


def floor_s(case: Case, machine: Machine, card: ModelCard, runner: ModelRunner, weight_bytes: int) -> float:
    """Weights once; KV of all tokens written or read once; two operations a weight and token, the head once a sequence."""
    kv_bytes = case.batch * (case.cached + case.tokens) * runner.kv.layout.bytes_per_token
    head = card.vocab_size * card.hidden_size
    embeddings = head if card.tie_word_embeddings else 2 * head
    layers = runner.weights_bytes // 2 - embeddings
    scores = case.batch * case.tokens * (case.cached + case.tokens / 2) * card.num_layers * card.num_heads * card.head_dim * 2
    products = (layers * case.step_tokens + head * case.batch) * weight_bytes / 2 + scores
    return max((weight_bytes * (layers + head) + kv_bytes) / machine.read_bytes_s, 2 * products / machine.bf16_flops_s)


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


def load(directory: Path, card: ModelCard, threads: int) -> tuple[list[ModelRunner], Any]:
    """Ours in bfloat16 and, where this machine can, in int8; and transformers' model."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    memory = POOL_TOKENS * card.kv_layout(16, "bfloat16").bytes_per_token
    config = EngineConfig(dtype="bfloat16", threads=threads, kv_cache_memory=memory)
    runners = [ModelRunner.load(directory, card, config)]
    try:
        runners.append(ModelRunner.load(directory, card, dataclasses.replace(config, quantization="int8")))
    except ConfigError:
        pass  # no compiled kernels here
    return runners, model.eval()


def run(directory: Path, threads: int, rounds: int) -> Table:
    card = ModelCard.load(directory)
    runners, model = load(directory, card, threads)
    machine = measure(threads)
    ours = {case: [our_step(case, runner, card.vocab_size) for runner in runners] for case in CASES}
    steps = {case: [*ours[case], peer_step(case, model)] for case in CASES}
    times: dict[Case, list[list[float]]] = {case: [[] for _ in steps[case]] for case in CASES}
    for together in steps.values():
        for step in together:
            step()  # warm up
    for _ in range(rounds):
        for case, together in steps.items():
            for step, found in zip(together, times[case], strict=True):
                found.append(mean_s(step))
    title = (
        f"{card.name}, {threads} thread(s), tokens/s and share of the floor: "
        f"memory {machine.read_bytes_s / 1e9:.0f} GB/s, bfloat16 products {machine.bf16_flops_s / 1e9:.0f} GFLOP/s"
    )
    names = ("bfloat16", "int8")[: len(runners)]
    columns = [column for name in names for column in (name, "of floor")]
    table = Table("step", "ms", *columns, "transformers bf16", "bfloat16 against it", title=title)
    for case, found in times.items():
        *own, peer = (statistics.median(one) for one in found)
        cells = [f"{own[0] * 1e3:.1f}"]
        for seconds, weight_bytes in zip(own, (2, 1), strict=False):
            floor = floor_s(case, machine, card, runners[0], weight_bytes)
            cells += [f"{case.step_tokens / seconds:,.0f}", f"{floor / seconds:.0%}"]
        table.add_row(case.name, *cells, f"{case.step_tokens / peer:,.0f}", f"{peer / own[0]:.2f} x")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    Console(width=120).print(run(resolve(args.model), args.threads, args.rounds))


if __name__ == "__main__":
    main()
