"""Drawing against a plain restatement of the rules. How often each token comes: test_sampler_distribution.py."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import edited, probabilities, sampling_cases, spec_of

from pdserve.core.sampling import GREEDY_BELOW, SamplingParams, uniform
from pdserve.core.step_plan import SampleSpec
from pdserve.engine import sampler
from pdserve.engine.sampler import distribution, sample

GREEDY = SamplingParams(temperature=0.0)


def draw(logits: list[float], index: int = 0, banned: tuple[int, ...] = (), **params) -> int:
    ((token, _),) = sample(torch.tensor([logits]), [SampleSpec(SamplingParams(**params), index, banned)])
    return token


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-8, 8).map(lambda i: i / 2), min_size=1, max_size=40),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 2.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.05, 0.313, 0.77, 0.931, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.41]),
)
def test_filters_equal_their_plain_restatement(logits, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    (weights,) = distribution(torch.tensor([logits]), [params]).double()
    expected = probabilities(logits, params)
    assert set(weights.nonzero()[:, 0].tolist()) <= set(expected)
    found = [float(weights[i] / weights.sum()) for i in expected]
    np.testing.assert_allclose(found, list(expected.values()), rtol=1e-6, atol=1e-9)


def test_weights_are_exponentials_and_their_sums_exact_in_any_order():
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(4, 30_000, generator=generator) * torch.tensor([[0.1], [2.0], [9.0], [300.0]])
    weights = sampler.weigh(logits, [1.0, 0.5, 2.0, 1e-9])
    exact = ((logits - logits.amax(1, keepdim=True)).double() / torch.tensor([[1.0], [0.5], [2.0], [1e-9]])).exp()
    assert (weights - exact).abs().le(4e-7 * exact + 2**-35).all()
    assert weights.amax(1).tolist() == [1.0] * 4
    shuffled = weights[:, torch.randperm(30_000, generator=generator)]
    assert torch.equal(weights.double().sum(1), shuffled.double().cumsum(1)[:, -1])
    assert torch.equal(weights.double() * 2.0**34, (weights.double() * 2.0**34).round())


@settings(max_examples=100, deadline=None)
@given(logits=st.lists(st.floats(-6, 6), min_size=2, max_size=30), seed=st.integers(0, 2**64 - 1), index=st.integers(0, 99))
def test_the_draw_inverts_the_cumulative_distribution_by_ascending_id(logits, seed, index):
    logits = torch.tensor(logits).tolist()  # as float32 holds them
    token = draw(logits, index, seed=seed, temperature=0.9)
    expected = probabilities(logits, SamplingParams(temperature=0.9))
    below = sum(p for i, p in expected.items() if i < token)
    assert below - 1e-6 <= uniform(seed, index) <= below + expected[token] + 1e-6


def test_greedy_takes_the_lowest_of_equal_ids_even_in_a_large_vocabulary():
    logits = torch.zeros(3, 50_000)
    logits[0, [49_999, 31_000, 17]] = 5.0
    logits[1, [40_000, 33_333]] = 5.0
    assert sample(logits, [SampleSpec(GREEDY, 0)] * 3) == [(17, None), (33_333, None), (0, None)]


def test_rows_that_are_plainly_greedy_take_what_the_model_found():
    """At no cost: neither their logits nor any other way to sample is looked at."""
    assert sample(torch.full((2, 4), torch.nan), [SampleSpec(GREEDY, 0)] * 2, best=[3, 1]) == [(3, None), (1, None)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_never_drawn(temperature):
    logits = [9.0, 8.0, 1.0, 1.0]
    drawn = {draw(logits, i, (0, 1, 77), temperature=temperature) for i in range(50)}
    assert drawn <= {2, 3}


def test_the_smallest_temperature_takes_the_likeliest_token_and_overflows_nothing():
    assert draw([1.0, 3.0, 2.0], temperature=GREEDY_BELOW) == 1


def test_a_top_p_of_0_takes_the_likeliest_token():
    assert {draw([1.0, 3.0, 2.0], index, top_p=0.0, temperature=2.0) for index in range(50)} == {1}


@settings(max_examples=100, deadline=None)
@given(sampling_cases(vocab=60, rows=4))
def test_a_row_does_not_depend_on_its_batch(case):
    logits, specs = case
    together = sample(logits.clone(), specs)
    order = [2, 0, 3, 1]
    assert sample(logits[order].clone(), [specs[i] for i in order]) == [together[i] for i in order]
    for i, spec in enumerate(specs):
        assert sample(logits[i : i + 1].clone(), [spec]) == [together[i]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@settings(max_examples=100, deadline=None)
@given(sampling_cases(vocab=5000, rows=8))
def test_a_gpu_draws_what_the_cpu_draws(case):
    logits, specs = case
    assert sample(logits.cuda(), specs) == sample(logits.clone(), specs)


def test_more_rows_than_are_taken_at_once(monkeypatch):
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    specs = [SampleSpec(SamplingParams(seed=i, logprobs=i % 3), i) for i in range(9)]
    together = sample(logits.clone(), specs)
    monkeypatch.setattr(sampler, "ROWS_AT_ONCE", 2)
    assert sample(logits.clone(), specs) == together


IDS = st.lists(st.integers(0, 11), max_size=20)


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.integers(-12, 12).map(lambda i: i / 4), min_size=12, max_size=12),
    prompt=IDS,
    output=IDS,
    presence=st.sampled_from([0.0, 1.5, -2.0]),
    frequency=st.sampled_from([0.0, 0.25, -0.5]),
    repetition=st.sampled_from([1.0, 2.0, 0.5]),
    bias=st.dictionaries(st.integers(0, 11), st.sampled_from([-100.0, 2.25, 0.5]), max_size=3),
)
def test_bias_and_penalties_equal_their_restatement_by_loops(logits, prompt, output, presence, frequency, repetition, bias):
    """Numbers that both ways compute exactly: so the winner, ties included, must be the same."""
    params = SamplingParams(
        temperature=0.0, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition,
        logit_bias=tuple(bias.items()),
    )  # fmt: skip
    expected = edited(logits, params, prompt, output)
    row = torch.tensor([logits])
    sampler._edit(row[0], spec_of(params, prompt, output))
    assert row[0].tolist() == expected
    ((token, _),) = sample(torch.tensor([logits]), [spec_of(params, prompt, output)])
    assert token == expected.index(max(expected))


def test_edits_that_a_spec_lacks_are_a_bug_and_not_passed_over():
    with pytest.raises(AssertionError):
        sample(torch.zeros(1, 4), [SampleSpec(SamplingParams(presence_penalty=1.0), 0)])


@settings(max_examples=100, deadline=None)
@given(sampling_cases(vocab=60))
def test_logprobs_are_the_models_own_whatever_is_done_to_its_logits(case):
    logits, specs = case
    expected = logits.double().log_softmax(1)
    for row, (spec, (token, found)) in enumerate(zip(specs, sample(logits.clone(), specs), strict=True)):
        wanted = spec.params.logprobs
        assert (found is None) == (wanted is None)
        if found is None:
            continue
        assert math.isclose(found.logprob, expected[row, token], rel_tol=1e-6, abs_tol=2e-6)
        ranked = sorted(range(60), key=lambda i, row=row: (-float(logits[row, i]), i))[:wanted]
        assert [token_id for token_id, _ in found.top] == ranked
        np.testing.assert_allclose([value for _, value in found.top], expected[row, ranked], rtol=1e-6, atol=2e-6)
