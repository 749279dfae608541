"""Whole steps on this device beside the same steps by torch in float32 on the CPU: every KV dtype, and drawn tokens.

Both sides have the same weights, which are exact in bfloat16, and compute the same tokens: prompts in chunks, then single
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.config import EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.kv_layout import ceil_div
from pdserve.core.sampling import SamplingParams, edits_of
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.models.weights import ModelWeights
from pdserve.engine.runner import ModelRunner
from pdserve.engine.sampler import sample
from tools.gpu.row import Row, Setup
from tools.gpu.shapes import BLOCK_SIZE, card, random_weights

KV_DTYPES = ("auto", "int8", "fp8_e4m3", "int4")
# Largest error of a step, as a share of the logits' size; both are root mean squares. It is about twice the worst error of
# bfloat16 by torch and by compiled code on a CPU (1.3, 2.5, 5.0 and 12.3 %). A wrong scale or block gives an error as large
# as the logits.
LARGEST_ERROR = {"auto": 0.03, "int8": 0.05, "fp8_e4m3": 0.10, "int4": 0.25}
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.3, top_k=40, seed=2, logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.8, min_p=0.02, seed=3),
    SamplingParams(temperature=0.7, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, seed=4),
    SamplingParams(temperature=1.0, logit_bias=((5, 4.0), (9, -100.0)), seed=5, logprobs=5),
)


def run(setup: Setup) -> None:
    """Run all checks. Raises `SystemExit` with the names of those that failed."""
    wrong = [kv_cache_dtype for kv_cache_dtype in KV_DTYPES if not check_logits(setup, kv_cache_dtype)]
    if not check_drawn(setup):
        wrong.append("drawing")
    if not check_drawn_by_steps(setup):
        wrong.append("drawing in a step")
    if wrong:
        raise SystemExit(f"not as it should be: {', '.join(wrong)}")


def check_logits(setup: Setup, kv_cache_dtype: str) -> bool:
    """Tell whether the logits of every step are near enough to the CPU's."""
    ours, reference = runner_on(setup, kv_cache_dtype, setup.device.type), runner_on(setup, kv_cache_dtype, "cpu", "float32")
    errors, largest = [], 0
    for plan in plans(setup):
        expected = reference.logits(plan)
        found = ours.logits(plan).cpu()
        errors.append(float((found - expected).square().mean() / expected.square().mean()) ** 0.5)
        largest = max(largest, len(plan.slices))
    worst, allowed = max(errors), LARGEST_ERROR[kv_cache_dtype]
    note = f"{len(errors)} steps of up to {largest} sequences; at most {allowed:.0%}"
    Row("engine", f"logits, KV {kv_cache_dtype}", f"off by {worst:.2%}", "torch, float32, CPU", note=note).emit()
    return worst <= allowed  # False for NaN


def check_drawn(setup: Setup) -> bool:
    """Tell whether the device draws the same tokens as the CPU from given rows of logits."""
    rows, vocab = (12, 300) if setup.rehearsed else (96, 128_256)
    logits = (torch.randn((rows, vocab), generator=torch.Generator().manual_seed(1)) * 3).round(decimals=2)
    here = sample(logits.to(setup.device, copy=True), specs(rows, vocab))
    there = sample(logits.clone(), specs(rows, vocab))
    equal = sum(a == b for a, b in zip(here, there, strict=True))
    name = f"drawn from {rows} x {vocab} logits"
    Row("engine", name, f"{equal} of {rows}", "CPU", note="tokens and log-probabilities").emit()
    return equal == rows


def check_drawn_by_steps(setup: Setup) -> bool:
    """Tell whether whole steps draw the tokens that the CPU draws from the logits of the same steps."""
    runner = runner_on(setup, "auto", setup.device.type)
    equal = total = 0
    for plan in plans(setup):
        if any(len(piece.token_ids) > 1 for piece in plan.slices):
            runner.execute(plan)
            continue
        vocab, asked = card(shape_name(setup)).vocab_size, specs(len(plan.slices), 64)
        logits = runner.logits(plan).cpu()
        assert logits.shape[1] == vocab
        drawn = runner.execute(StepPlan(tuple(p._replace(samples=(s,)) for p, s in zip(plan.slices, asked, strict=True))))
        expected = sample(logits, specs(len(plan.slices), 64))
        equal += sum(a == b for a, b in zip(drawn, expected, strict=True))
        total += len(drawn)
    Row("engine", "drawn by whole steps", f"{equal} of {total}", "CPU", note="from the same logits").emit()
    return equal == total


def shape_name(setup: Setup) -> str:
    """Return the name of the shape, as `card` takes it."""
    return "rehearsal" if setup.rehearsed else "small"


def specs(rows: int, vocab: int) -> list[SampleSpec]:
    """Return a spec for each row, all kinds in turn. Those with penalties have seen some ids."""
    made = []
    for row in range(rows):
        params = KINDS[row % len(KINDS)]
        edits = edits_of(params, prompt_len=2)
        if edits is not None:
            edits.catch_up([row % vocab, 3, 5, 7, 5])
        made.append(SampleSpec(params, output_index=row, banned_ids=(1,) if row % 5 == 0 else (), edits=edits))
    return made


def runner_on(setup: Setup, kv_cache_dtype: str, device: str, dtype: str = "bfloat16") -> ModelRunner:
    """Return a runner on `device`. Its random weights are the same on every device."""
    shape, room = card(shape_name(setup)), max(lengths(setup)) + decodes(setup)
    blocks = len(lengths(setup)) * ceil_div(room, BLOCK_SIZE)
    config = EngineConfig(
        dtype=dtype, device=device, block_size=BLOCK_SIZE, max_num_seqs=4, max_model_len=room, kv_cache_dtype=kv_cache_dtype,
        kv_cache_memory=blocks * shape.kv_layout(BLOCK_SIZE, dtype, kv_cache_dtype).block_bytes,
    )  # fmt: skip

    def weights(dtype: torch.dtype, device: torch.device) -> ModelWeights:
        torch.manual_seed(3)
        return on(random_weights(shape, torch.bfloat16, torch.device("cpu")), dtype, device)

    return ModelRunner.make(shape, config, weights)


def on(weights: ModelWeights, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Return the same weights in another dtype and on another device."""

    def moved(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype)

    return weights.map(moved)


def lengths(setup: Setup) -> tuple[int, ...]:
    """Return the number of tokens of each prompt."""
    return (5, 40) if setup.rehearsed else (40, 333, 7)


def decodes(setup: Setup) -> int:
    """Return the number of single tokens that follow each prompt."""
    return 3 if setup.rehearsed else 24


def plans(setup: Setup) -> list[StepPlan]:
    """Return the steps: prompts in two chunks, of which the first has whole blocks, then one token of each sequence a step.
    Blocks are shuffled.
    """
    each, count = lengths(setup), ceil_div(max(lengths(setup)) + decodes(setup), BLOCK_SIZE)
    order = torch.randperm(len(each) * count, generator=torch.Generator().manual_seed(2)).tolist()
    tables = [tuple(BlockId(b) for b in order[i * count : (i + 1) * count]) for i in range(len(each))]
    cuts = [[0, n // 2 // BLOCK_SIZE * BLOCK_SIZE, *range(n, n + decodes(setup) + 1)] for n in each]

    def piece(sequence: int, step: int) -> SequenceSlice:
        begin, end = cuts[sequence][step : step + 2]
        ids = tuple((11 + 17 * sequence + 7 * j) % 128 for j in range(begin, end))
        return SequenceSlice(SeqId(sequence), begin, ids, (tables[sequence],), ())

    steps = [[piece(i, step) for i in range(len(each))] for step in range(decodes(setup) + 2)]
    return [StepPlan(tuple(piece for piece in pieces if piece.token_ids)) for pieces in steps]
