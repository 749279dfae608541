"""The benchmark of speculative decoding compares every token, counts full steps, and reports on texts that tuned nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.engine.speculation import MODES, Counts, SpeculationRuns, TextBatch, measure, perturbed, rate_ratio, run_of, table_of
from bench.engine.speculation_texts import HALVES, KINDS, TEXTS, Text, copied, of_kind
from pdserve.checkpoint.resolve import resolve
from pdserve.config import MIB, EngineConfig, SpeculativeConfig
from pdserve.engine.drafting.costs import StepCosts


@pytest.mark.parametrize("kind", KINDS)
def test_the_halves_of_a_kind_share_no_text(kind):
    tune, report = (of_kind(kind, half) for half in HALVES)
    assert min(len(tune), len(report)) >= TEXTS // 2
    assert not {text.message for text in tune} & {text.message for text in report}
    assert {text.kind for text in tune + report} == {kind}


def test_a_copy_ends_where_it_leaves_the_text():
    decode = "".join
    assert copied(list("one two"), "say: one two three", decode) == 7
    assert copied(list("one tx"), "say: one two three", decode) == 5
    assert copied([], "say", decode) == copied(["x"], "say", decode) == 0


@pytest.fixture(scope="module")
def bench() -> SpeculationRuns:
    config = EngineConfig(
        model="tiny", dtype="bfloat16", threads=1, kv_cache_memory=16 * MIB,
        speculative_config=SpeculativeConfig(method="suffix"),
    )  # fmt: skip
    return SpeculationRuns(resolve("tiny"), config)


@pytest.fixture
def texts(bench) -> list[Text]:
    some = of_kind("chat", "report")[:4]
    bench.answer(some, 24, whole=True)
    return some


def test_only_steps_of_the_whole_batch_count(bench, texts):
    """Three of six requests at a time, of 24 tokens each: the first token of each comes from its prompt."""
    off = bench.run(texts, 0, 6, 3, None)
    assert off.tokens == 3 * off.steps
    assert 23 <= off.steps <= 46
    assert off.drafts == off.accepted == off.drafted == 0
    assert min(off.wall_s, off.cpu_s) > 0


def test_drafts_are_counted_and_change_no_token(bench, texts):
    """A tiny model of random weights repeats itself, so most drafts are right. Rows cost nothing here, so they are verified."""
    choice = bench.cold_choice()
    choice.costs = StepCosts([(1, 1.0)])
    on = run_of(bench, texts, 1, 0, choice)
    assert on.tokens == on.steps + on.accepted
    assert 0 < on.accepted <= on.drafts
    assert 0 < on.drafted <= on.steps


def test_a_run_does_not_know_the_texts_of_an_earlier_one(bench, texts):
    choice = bench.cold_choice()
    bench.run(texts, 0, 4, 2, choice)
    assert not choice._drafters[1]._groups
    assert not choice._odds._own, "those that were stopped are forgotten as well"


def test_another_token_is_found(bench, texts):
    texts[1].answer[7] += 1
    with pytest.raises(AssertionError, match="another token at 7"):
        bench.run(texts, 0, 3, 1, bench.choice)


def test_a_table_has_a_row_for_each_cell(bench, texts):
    *_, found = measure(bench, {"chat": texts, "copy": []}, (1, 2), 3)
    assert list(found) == [TextBatch("chat", 1), TextBatch("chat", 2)]
    assert {len(rounds[mode]) for rounds in found.values() for mode in MODES} == {3}
    assert table_of(found, "").row_count == 2


def test_a_ratio_is_that_of_tokens_a_second():
    rounds = {"off": [Counts(10, 10, 2.0, 1.0)] * 3, "warm": [Counts(10, 30, 3.0, 2.0)] * 3}
    assert rate_ratio(rounds, "warm", cpu=True).median == 1.5
    assert rate_ratio(rounds, "warm", cpu=False).median == 2.0


def test_noise_changes_matrices_alone_by_its_share():
    directory = resolve("tiny")
    with perturbed(directory, 0.0) as same:
        assert same == directory
    with perturbed(directory, 0.01) as noisy:
        before, after = (load_file(Path(place) / "model.safetensors") for place in (directory, noisy))
    assert not noisy.exists()
    for name, one in before.items():
        changed = (after[name].float() - one.float()).square().mean().sqrt() / one.float().square().mean().sqrt()
        assert after[name].dtype == one.dtype
        assert torch.equal(after[name], one) if one.dim() < 2 else 0.005 < changed < 0.02, name
