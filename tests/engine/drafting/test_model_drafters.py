"""Drafters with a model, on the tiny model. No token and no byte of KV depends on them; nothing of what has ended is kept.

The costs of all steps are made equal, so that drafts are always taken.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from engine_ways import COMPILED

from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig, SpeculativeConfig
from pdserve.core.block_pools import BlockPools
from pdserve.core.errors import ConfigError
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import GREEDY, Sampled, StepPlan
from pdserve.engine.drafting import models
from pdserve.engine.drafting.api import DraftView
from pdserve.engine.drafting.choice import DraftChoice
from pdserve.engine.drafting.costs import StepCosts
from pdserve.engine.drafting.models import ModelDraft, SelfDrafter
from pdserve.engine.drafting.setup import make_choice
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.collect import OutputToken
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SequenceKind
from pdserve.worker.engine_thread import EngineSteps

pytestmark = COMPILED
BLOCK, LONGEST, OUTPUT = 16, 160, 40
SMALL = EngineConfig(kv_cache_memory=64 * MIB, max_num_seqs=16, max_num_batched_tokens=48, threads=1)


def with_drafts(runner: ModelRunner, how: SpeculativeConfig, **settings: object) -> DraftChoice:
    directory = resolve("tiny")
    config = replace(SMALL, model="tiny", speculative_config=how, **settings)  # type: ignore[arg-type]
    choice = make_choice(directory, ModelCard.load(directory), config, runner)
    assert choice is not None
    choice.costs = StepCosts([(1, 1.0)])
    if isinstance(choice._model, SelfDrafter | ModelDraft):
        choice._model.place_s = lambda sequences, read: 1e-3  # type: ignore[method-assign]
    return choice


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(1)
    return [tuple(rng.randrange(3, 512) for _ in range(length)) for length in (1, 15, 16, 33, 70)]


def params(i: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=OUTPUT - i, temperature=i % 2 * 0.9, top_p=0.9, seed=i, repetition_penalty=1.3 if i == 4 else 1.0,
        logprobs=2 if i == 2 else None, ignore_eos=True,
    )  # fmt: skip


Outputs = list[list[OutputToken]]


def serve(runner: ModelRunner, choice: DraftChoice | None, blocks: int = 96) -> tuple[Outputs, EngineSteps, list[torch.Tensor]]:
    """Serve all prompts at once. Return the output and the KV of each, and what made the steps."""
    pool = BlockPools(blocks)
    scheduler = Scheduler(pool, BLOCK, max_num_seqs=64, max_num_batched_tokens=48, max_model_len=LONGEST, eos_token_ids=(2,))
    steps = EngineSteps(scheduler, pool, choice=choice)
    for i, prompt in enumerate(prompts()):
        scheduler.add(SeqId(i), RequestSpec(prompt, params(i)), kind=SequenceKind.LOCAL)
    outputs: Outputs = [[] for _ in prompts()]
    kv = [torch.empty(0)] * len(outputs)
    while scheduler.has_work:
        plan, _ = steps.begin(())
        events = steps.finish(runner.execute(plan), 0.01)
        scheduler.check_invariants()
        tables = {piece.seq_id: piece.block_tables[0] for piece in plan.slices}
        for token in events.tokens:
            outputs[token.seq_id].append(token._replace(speculation=None))
            if token.finish_reason is not None:
                count = len(prompts()[token.seq_id]) + token.output_index
                held = runner.kv.caches[0].tensor[list(tables[token.seq_id])]
                kv[token.seq_id] = held.movedim(-2, 1).flatten(0, 1)[:count].clone()
    assert pool.num_free == blocks
    return outputs, steps, kv


HOW = {
    "self": SpeculativeConfig("self", num_speculative_tokens=5),
    "self-int8": SpeculativeConfig("self", quantization="int8"),
    "self-1-layer": SpeculativeConfig("self", draft_layers=1),
    "model": SpeculativeConfig("draft_model", model="tiny"),
    "model-int4": SpeculativeConfig("draft_model", model="tiny", quantization="int4"),
    "suffix": SpeculativeConfig("suffix"),
}
CASES = [(how, None) for how in HOW] + [(how, "int8") for how in HOW if how != "self-int8"]  # the same weights are refused


@pytest.mark.parametrize("blocks", [96, 14])
@pytest.mark.parametrize(("name", "quantization"), CASES)
def test_tokens_and_kv_are_those_without_drafts(make_runner, name, quantization, blocks):
    """In a pool of 14 blocks some sequences are preempted."""
    how, runner = HOW[name], make_runner(dtype="bfloat16", quantization=quantization)
    plain, _, kv = serve(runner, None, blocks)
    choice = with_drafts(runner, how, quantization=quantization)
    for _ in range(2):
        drafted, steps, drafted_kv = serve(runner, choice, blocks)
        assert drafted == plain
        assert all(map(torch.equal, drafted_kv, kv))
        assert steps._drafted is not None
        assert steps._drafted.num_drafts > 0
        if how.method != "suffix":
            assert any(kind.startswith(("self", "draft model")) for kind in choice._odds._kinds)
    assert not choice._odds._own, "nothing of a sequence that has ended is kept"


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8", "int4", "fp32"])
@pytest.mark.parametrize("name", ["self", "model"])
def test_quantised_blocks_are_those_without_drafts(make_runner, name, kv_cache_dtype):
    """A copy of the weights writes into blocks that hold older tokens; not a byte of them may change."""
    runner = make_runner(dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    plain, _, kv = serve(runner, None)
    choice = with_drafts(runner, HOW[name], kv_cache_dtype=kv_cache_dtype)
    drafted, steps, drafted_kv = serve(runner, choice)
    assert drafted == plain
    assert all(map(torch.equal, drafted_kv, kv))
    assert steps._drafted is not None
    assert steps._drafted.num_accepted_tokens > 20


def test_a_draft_model_that_is_the_model_itself_is_always_right(make_runner):
    """Also for random draws: it draws with the sequence's own numbers."""
    runner = make_runner(dtype="bfloat16")
    choice = with_drafts(runner, SpeculativeConfig("draft_model", model="tiny", prompt_lookup_min=32))
    _, steps, _ = serve(runner, choice)
    assert steps._drafted is not None
    assert steps._drafted.acceptance_rate > 0.99
    assert isinstance(choice._model, ModelDraft)
    assert len(choice._model._free) == choice._model._num_blocks
    assert not choice._model._known


def test_a_draft_model_without_blocks_drafts_for_those_that_have_some(make_runner):
    runner = make_runner(dtype="bfloat16")
    choice = with_drafts(runner, SpeculativeConfig("draft_model", model="tiny"))
    assert isinstance(choice._model, ModelDraft)
    del choice._model._free[7:]
    choice._model._num_blocks = 7
    plain, _, _ = serve(runner, None)
    drafted, _, _ = serve(runner, choice)
    assert drafted == plain
    assert len(choice._model._free) == 7


@pytest.mark.parametrize(("how", "settings", "words"), [
    (SpeculativeConfig("self", quantization="int8"), {"quantization": "int8"}, "the model has itself"),
    (SpeculativeConfig("self", draft_layers=4), {}, "draft_layers must be below the model's"),
    (SpeculativeConfig("self"), {"dtype": "float32"}, "needs compiled steps"),
    (SpeculativeConfig("draft_model", model="default"), {}, "has 49152 token ids, and the model has 512"),
])  # fmt: skip
def test_what_does_not_run_here_is_refused_by_name(make_runner, how, settings, words):
    runner = make_runner(**{"dtype": "bfloat16", **settings})
    with pytest.raises(ConfigError, match=words):
        with_drafts(runner, how, **settings)


def test_nothing_is_loaded_where_nothing_drafts(make_runner):
    directory = resolve("tiny")
    assert make_choice(directory, ModelCard.load(directory), SMALL, make_runner(dtype="bfloat16")) is None


def test_a_draft_model_spends_little_time_on_prompts(monkeypatch):
    """Long prompts come, and nothing is known of their outputs. A step of 256 tokens takes a quarter of a second."""
    now_s, computed = [0.0], [0]
    monkeypatch.setattr(models.time, "perf_counter", lambda: now_s[0])

    def execute(plan: StepPlan) -> list[Sampled]:
        computed[0] += sum(len(piece.token_ids) for piece in plan.slices if len(piece.token_ids) > 1)
        return [(5, None) for piece in plan.slices for _ in piece.samples]

    costs = StepCosts([(1, 0.001), (256, 0.256)])
    model = ModelDraft(execute, costs, num_blocks=4000, block_size=16, groups=1, longest=4000, most=4)
    drafted = 0
    for step in range(20_000):
        now_s[0] += 0.007
        sequence = step // 10_000
        view = DraftView(SeqId(sequence), [3] * (1000 + step % 10_000 // 100), 1000, b"", 4, draws=lambda: AnyDraw())
        drafted += bool(model.propose([view])[0].token_ids)
    assert drafted > 1000
    assert 2000 < computed[0] < 3000
    assert 0.001 * computed[0] < 0.03 * now_s[0]


class AnyDraw:
    spec = GREEDY

    def take(self, token_id: int) -> bool:
        return True
