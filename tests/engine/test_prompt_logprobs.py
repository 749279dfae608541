"""Log-probabilities of prompt tokens on the tiny model: those that the same tokens have as output, whatever the steps are."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from engine_ways import WAYS

from pdserve.core.block_pools import BlockPools
from pdserve.core.ids import SeqId
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import SamplingParams, TokenLogprobs
from pdserve.engine.runner import ModelRunner
from pdserve.engine.schedule.collect import OutputToken
from pdserve.engine.schedule.scheduler import Scheduler
from pdserve.engine.schedule.sequence import SCORED_TOKENS, SequenceKind

BLOCKS, BLOCK, OUTPUT = 96, 16, 90
GREEDY = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
Served = dict[int, list[OutputToken]]


def serve(
    runner: ModelRunner,
    specs: list[RequestSpec],
    *,
    budget: int = 256,
    kind: SequenceKind = SequenceKind.LOCAL,
    blocks: int = BLOCKS,
) -> tuple[Served, int, int]:
    """Serve all requests at once. Return their tokens, the most scored tokens of a step, and how often one was preempted."""
    pool = BlockPools(blocks)
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": budget, "max_model_len": min(256, blocks * BLOCK)}
    scheduler = Scheduler(pool, BLOCK, **limits, eos_token_ids=(2,), prefix_salt=b"s")
    for number, spec in enumerate(specs):
        scheduler.add(SeqId(number), spec, kind=kind)
    served: Served = {number: [] for number in range(len(specs))}
    most = preempted = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        most = max(most, sum(spec.scored is not None for spec in plan.specs))
        outcome = scheduler.collect(runner.execute(plan))
        preempted += len(outcome.preempted)
        for token in outcome.tokens:
            served[token.seq_id].append(token)
        if kind is SequenceKind.LENT:
            for seq_id in range(len(specs)):
                if served[seq_id]:
                    scheduler.return_lease(SeqId(seq_id))
    scheduler.check_invariants()
    assert pool.counts().held == 0
    return served, most, preempted


def prompt_of(length: int, seed: int = 1) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 512) for _ in range(length))


@pytest.mark.quick("float32", "*-compiled")
@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_scores_as_the_same_tokens_did_when_they_were_drawn(way, make_runner: Callable[..., ModelRunner]) -> None:
    """(1) An output is drawn with log-probabilities; (2) prompt and output together are a prompt. It is computed in several
    chunks, alone and in company, lent and not. Every score of the output's part is the same, bit for bit."""
    runner = make_runner(**way, batch_invariant=True)
    prompt = prompt_of(37)
    drawn, _, _ = serve(runner, [RequestSpec(prompt, replace(GREEDY, logprobs=3))])
    whole = prompt + tuple(token.token_id for token in drawn[0])
    expected = [token.logprobs for token in drawn[0]]
    one = RequestSpec(whole, replace(GREEDY, max_tokens=1, prompt_logprobs=3))
    others = [RequestSpec(prompt_of(n, n), replace(GREEDY, max_tokens=9, prompt_logprobs=n % 3)) for n in (1, 20, 90)]
    for specs, budget, kind in (
        ([one], 256, SequenceKind.LOCAL), ([one], 24, SequenceKind.LENT), ([one, *others, one], 256, SequenceKind.LOCAL),
    ):  # fmt: skip
        served, most, _ = serve(runner, specs, budget=budget, kind=kind)
        assert most <= 2 * SCORED_TOKENS
        for number, spec in enumerate(specs):
            scores = served[number][0].prompt_logprobs
            assert len(scores) == len(spec.prompt_ids) - 1
            assert all(len(score.top) == spec.sampling.prompt_logprobs for score in scores)
            assert all(not token.prompt_logprobs for token in served[number][1:])
            if spec is one:
                assert list(scores[len(prompt) - 1 :]) == expected


def test_a_shared_prefix_is_computed_anew_for_its_scores(make_runner: Callable[..., ModelRunner]) -> None:
    """A plain request publishes its blocks first. The scored one of the same prompt still has a score for each token."""
    runner, prompt = make_runner(dtype="float32", batch_invariant=True), prompt_of(100)
    plain = RequestSpec(prompt, replace(GREEDY, max_tokens=1))
    scored = RequestSpec(prompt, replace(GREEDY, max_tokens=1, prompt_logprobs=0))
    alone, _, _ = serve(runner, [scored])
    after, _, _ = serve(runner, [plain, scored], budget=100)
    assert after[1][0].prompt_logprobs == alone[0][0].prompt_logprobs
    assert len(alone[0][0].prompt_logprobs) == 99


def test_a_preempted_prompt_is_not_scored_twice(make_runner: Callable[..., ModelRunner]) -> None:
    """The pool is too small for both outputs. The preempted sequence is computed again without scores, which went out."""
    runner = make_runner(dtype="float32", batch_invariant=True)
    specs = [RequestSpec(prompt_of(60, n), replace(GREEDY, prompt_logprobs=1)) for n in (1, 2)]
    served, _, preempted = serve(runner, specs, blocks=12)
    assert preempted
    for tokens in served.values():
        assert len(tokens) == OUTPUT
        assert [len(token.prompt_logprobs) for token in tokens] == [59] + [0] * (OUTPUT - 1)


def test_scores_are_those_of_the_softmax_of_all_logits(make_runner: Callable[..., ModelRunner]) -> None:
    """The reference is torch's log_softmax in float64 of the logits of all rows in one step."""
    runner, prompt = make_runner(dtype="float32", batch_invariant=True), prompt_of(50)
    served, _, _ = serve(runner, [RequestSpec(prompt, replace(GREEDY, max_tokens=1, prompt_logprobs=5))])
    plan = Scheduler(
        BlockPools(BLOCKS), BLOCK, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=256, eos_token_ids=(2,)
    )
    plan.add(SeqId(9), RequestSpec(prompt, GREEDY), kind=SequenceKind.LOCAL)
    reference = runner.logits(plan.plan()).double().log_softmax(-1)
    for row, score in enumerate(served[0][0].prompt_logprobs):
        assert score.logprob == pytest.approx(float(reference[row, prompt[row + 1]]), abs=1e-4)
        values, ids = torch.topk(reference[row], 5)
        assert [one for one, _ in score.top] == ids.tolist()
        assert [value for _, value in score.top] == pytest.approx(values.tolist(), abs=1e-4)
    assert isinstance(served[0][0].prompt_logprobs[0], TokenLogprobs)
