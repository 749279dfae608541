"""Drafts on the tiny model: no token and no bit of KV depends on them in batch-invariant mode."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from engine_ways import COMPILED, WAYS
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.config import MIB, EngineConfig
from pdserve.core.block_pools import BlockPools
from pdserve.core.errors import OutOfMemory
from pdserve.core.ids import SeqId
from pdserve.core.model_spec import ModelSpec
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.shards import RankShare
from pdserve.core.step_plan import StepPlan
from pdserve.engine.kernels.support import triton_installed
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.layers.linear import COMPILED_SCHEMES
from pdserve.engine.layers.ranks import Alone
from pdserve.engine.layers.rows import TiledRows
from pdserve.engine.models import choice
from pdserve.engine.models import native_decoder as native
from pdserve.engine.models.api import Model
from pdserve.engine.models.weights import ModelWeights
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.collect import OutputToken
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind
from tests.engine.drafted_rows import ILL, Case, cases, check_drafts
from tests.engine.native.feature_models import MODELS, weights_of

BLOCKS, BLOCK, LONGEST, OUTPUT = 96, 16, 160, 36
Guess = Callable[[int, int], tuple[int, ...]]
Served = tuple[list[list[OutputToken]], list[torch.Tensor], int]


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(1)
    return [tuple(rng.randrange(3, 512) for _ in range(length)) for length in (1, 15, 16, 33, 70)]


def params(i: int) -> SamplingParams:
    """Greedy and random draws, with log-probabilities, with banned stop ids and with a penalty."""
    logprobs, least = (2 if i == 2 else None), (20 if i == 3 else 0)
    penalty = 1.3 if i == 4 else 1.0
    return SamplingParams(
        max_tokens=OUTPUT, temperature=i % 2 * 0.9, top_p=0.9, seed=i, logprobs=logprobs, min_tokens=least, stop_token_ids=(7,),
        repetition_penalty=penalty,
    )  # fmt: skip


def serve(runner: ModelRunner, guess: Guess) -> Served:
    """Serve all prompts at once. Return the output and the KV of each, and the number of steps.

    The KV is that of all tokens but the last, [tokens, ...], read when the sequence ends.
    """
    pool = BlockPools(BLOCKS)
    scheduler = Scheduler(pool, BLOCK, max_num_seqs=64, max_num_batched_tokens=48, max_model_len=LONGEST, eos_token_ids=(2,))
    for i, prompt in enumerate(prompts()):
        scheduler.add(SeqId(i), RequestSpec(prompt, params(i)), kind=SequenceKind.LOCAL)
    outputs: list[list[OutputToken]] = [[] for _ in prompts()]
    kv = [torch.empty(0)] * len(outputs)
    steps = 0
    while scheduler.has_work:
        plan = scheduler.plan({SeqId(i): guess(i, len(output)) for i, output in enumerate(outputs)})
        outcome = scheduler.collect(runner.collect(runner.launch(plan)))
        steps += 1
        tables = {piece.seq_id: piece.block_tables[0] for piece in plan.slices}
        for token in outcome.tokens:
            outputs[token.seq_id].append(token._replace(speculation=None))
            if token.finish_reason is not None:
                count = len(prompts()[token.seq_id]) + token.output_index
                kv[token.seq_id] = committed(runner, tables[token.seq_id], count)
    scheduler.check_invariants()
    assert pool.num_free == BLOCKS
    return outputs, kv, steps


def committed(runner: ModelRunner, table: tuple[int, ...], count: int) -> torch.Tensor:
    """Return the KV of the first `count` tokens, [count, layers, 2, heads, dim]; quantised: their bytes and those of scales."""
    cache = runner.kv.caches[0]
    numbers = cache.tensor[list(table)].movedim(-2, 1).flatten(0, 1)[:count]
    if cache.scales is None:
        return numbers.clone()
    scales = cache.scales[list(table[: -(-count // BLOCK)])]
    return torch.cat((numbers.flatten().view(torch.uint8), scales.contiguous().flatten().view(torch.uint8)))


def guesses(outputs: list[list[OutputToken]], wrong: float, most: int) -> Guess:
    """Guess up to `most` tokens of known outputs; a share of `wrong` of them is replaced by any id."""
    rng = random.Random(3)

    def guess(i: int, known: int) -> tuple[int, ...]:
        right = [token.token_id for token in outputs[i][known : known + rng.randint(0, most)]]
        return tuple(rng.randrange(512) if rng.random() < wrong else token_id for token_id in right)

    return guess


@pytest.mark.quick("float32", "*-compiled")
@pytest.mark.parametrize("way", WAYS)
def test_tokens_and_kv_are_those_without_drafts(make_runner, way):
    runner = make_runner(**way, batch_invariant=True)
    outputs, kv, steps = serve(runner, lambda *_: ())
    assert any(token.logprobs for token in outputs[2])
    for wrong, most in ((0.0, 7), (0.4, 5), (1.0, 3)):
        drafted, drafted_kv, drafted_steps = serve(runner, guesses(outputs, wrong, most))
        assert drafted == outputs
        assert all(torch.equal(a, b) for a, b in zip(kv, drafted_kv, strict=True))
        if wrong < 1.0:
            assert drafted_steps < steps, "no draft was taken"


@COMPILED
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3", "int4"])
def test_tokens_and_bytes_of_quantised_kv_are_those_without_drafts(make_runner, kv_cache_dtype):
    runner = make_runner(dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    assert runner.drafts_obstacle is None
    outputs, kv, steps = serve(runner, lambda *_: ())
    for wrong, most in ((0.0, 7), (0.3, 7), (0.4, 5), (1.0, 3)):
        drafted, drafted_kv, drafted_steps = serve(runner, guesses(outputs, wrong, most))
        assert drafted == outputs
        assert all(map(torch.equal, kv, drafted_kv))
        if wrong < 1.0:
            assert drafted_steps < steps, "no draft was taken"


QUANTISED = ("int8", "fp8_e4m3", "int4")
COMPILED_MODELS = {name: MODELS[name] for name in ("qwen3", "mistral", "gemma3", "mixed", "latent", "latent_many", "mixtral")}


def ill_weights(spec: ModelSpec) -> ModelWeights:
    """Random weights. A draft that is `ILL` is no number from its first layer on, and neither is what its block then holds."""
    weights = weights_of(spec)
    weights.embedding[ILL] = float("nan")
    return weights


@cache
def compiled_model(name: str, kv_dtype: str) -> tuple[native.NativeDecoder, KvPool]:
    spec = COMPILED_MODELS[name]
    kv = KvPool(spec.kv_spec(BLOCK, kv_dtype), 4 * MIB, torch.device("cpu"), torch.bfloat16)
    weights = (weights_of if kv_dtype == "bfloat16" else ill_weights)(spec).map(lambda one: one.to(torch.bfloat16))
    return native.NativeDecoder(RankShare(spec), weights, kv, 640, COMPILED_SCHEMES[None]), kv


@COMPILED
@pytest.mark.quick("qwen3-*", "mistral-int8", "latent-int8")
@pytest.mark.parametrize("kv_dtype", [*QUANTISED, "bfloat16"])
@pytest.mark.parametrize("name", COMPILED_MODELS)
@given(cases(), st.integers(0, 99), st.sampled_from([1, 2]))
@settings(max_examples=40, deadline=None)
def test_compiled_rows_of_drafts_are_those_of_single_steps(name, kv_dtype, cases, seed, threads):
    """GQA, windows of 1 to 300 positions, several KV groups and latent attention.

    The rows of plain KV attend together, and a draft that is no number reaches those before it.
    """
    model, kv = compiled_model(name, kv_dtype)
    model.threads = threads
    check_drafts(model, [kv], cases, seed)


@cache
def torch_twin(name: str, kv_dtype: str, kind: str) -> tuple[Model, KvPool]:
    """A model by torch or by Triton, whose functions of rows do not depend on other rows."""
    spec = COMPILED_MODELS[name]
    kv = KvPool(spec.kv_spec(BLOCK, kv_dtype), 4 * MIB, torch.device("cpu"), torch.float32)
    ranks = Alone(RankShare(spec))
    config = EngineConfig("toy", dtype="float32", batch_invariant=kind == "torch")
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        if kind == "Triton":
            patch.setattr(choice, "triton_usable", lambda device: True)
            patch.setattr(choice, "WholeRows", lambda: TiledRows(ranks.agree))
            patch.setattr(choice, "_recorded", lambda *step: None)
        model = choice.torch_model((ill_weights if kind == "torch" else weights_of)(spec), kv, config, 640, ranks)
    assert model.way == kind
    return model, kv


@pytest.mark.quick("qwen3-*", "latent-int8")
@pytest.mark.parametrize("kv_dtype", [*QUANTISED, "float32"])
@pytest.mark.parametrize("name", ["qwen3", "mistral", "mixed", "latent"])
@given(cases(most=120), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_rows_of_drafts_by_torch_are_those_of_single_steps(name, kv_dtype, cases, seed):
    model, kv = torch_twin(name, kv_dtype, "torch")
    check_drafts(model, [kv], cases, seed)


@pytest.mark.skipif(not triton_installed(), reason="the kernels need Triton: pip install 'pdserve[gpu]'")
@pytest.mark.quick("case0-qwen3-int8", "case0-qwen3-float32")
@pytest.mark.parametrize("kv_dtype", [*QUANTISED, "float32"])
@pytest.mark.parametrize("name", ["qwen3", "latent"])
@pytest.mark.parametrize("case", [Case(14, 5, 2), Case(14, 5, 3), Case(3, 4, 1)])
def test_rows_of_drafts_by_triton_are_those_of_single_steps(name, kv_dtype, case):
    """The first has its block filled by row 2: rows 0 and 1 count, then rows 0 to 2."""
    model, kv = torch_twin(name, kv_dtype, "Triton")
    check_drafts(model, [kv], [case, Case(16, 0, 1), Case(5, 2, 2)], 1, company=False)


class Event:
    """A CUDA event whose work is done once somebody has waited for it."""

    def __init__(self) -> None:
        self.recorded = self.waited = False
        self.error: Exception | None = None

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        assert self.recorded
        self.waited = True
        if self.error is not None:
            raise self.error


@pytest.fixture
def as_on_cuda(make_runner, monkeypatch) -> ModelRunner:
    """A runner on the CPU that queues its steps as it does on a GPU."""
    runner = make_runner()
    monkeypatch.setattr(runner, "_on_cuda", True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return runner


def plans(scheduler: Scheduler) -> StepPlan:
    for i, prompt in enumerate(prompts()[:2]):
        scheduler.add(SeqId(i), RequestSpec(prompt, SamplingParams(temperature=i * 1.0)), kind=SequenceKind.LOCAL)
    return scheduler.plan()


@pytest.mark.parametrize("budget", [1, 48])
def test_a_queued_step_is_waited_for_by_collect(as_on_cuda, make_runner, budget):
    """A step of plainly greedy rows (1 token) and one with other rows (both prompts) give the tokens of the CPU."""
    scheduler = Scheduler(
        BlockPools(16), BLOCK, max_num_seqs=4, max_num_batched_tokens=budget, max_model_len=64, eos_token_ids=()
    )
    plan = plans(scheduler)
    pending = as_on_cuda.launch(plan)
    assert not pending.written.waited
    assert (pending.best is not None) == (budget == 1)
    drawn = as_on_cuda.collect(pending)
    assert pending.written.waited
    as_on_cuda._on_cuda = False
    assert drawn == as_on_cuda.execute(plan)
    assert len(drawn) == len(plan.specs)


def test_a_step_that_draws_nothing_is_waited_for_as_well(as_on_cuda, make_sheets):
    (sheet,) = make_sheets(as_on_cuda, [20], random.Random(0))
    pending = as_on_cuda.launch(sheet.whole())
    assert as_on_cuda.collect(pending) == []
    assert pending.written.waited


def test_queued_work_that_gets_no_memory_is_told_by_collect(as_on_cuda, make_sheets):
    (sheet,) = make_sheets(as_on_cuda, [20], random.Random(0))
    pending = as_on_cuda.launch(sheet.whole())
    pending.written.error = torch.OutOfMemoryError("planted")
    with pytest.raises(OutOfMemory, match="a step of 20 tokens of 1 sequences got no memory"):
        as_on_cuda.collect(pending)
    pending.written.error = RuntimeError("planted")
    with pytest.raises(RuntimeError, match="planted"):
        as_on_cuda.collect(pending)
