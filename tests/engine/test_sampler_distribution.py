"""How often each token is drawn, against the distribution that the rules give, computed plainly in float64.

Chi-square of 80,000 draws. Seeds are fixed, so a test cannot fail by chance; the bound is what a right sampler would
exceed with one seed in a million. Samplers that are wrong in the ways one is easily wrong exceed it by far.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sampling_cases import edited, probabilities, spec_of

from pdserve.core.sampling import SamplingParams
from pdserve.core.step_plan import SampleSpec
from pdserve.engine import sampler
from pdserve.engine.native import library
from pdserve.engine.sampler import sample

DRAWS = 80_000
VOCAB = 512
LOGITS = (torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2.5).round(decimals=2)
PROMPT, OUTPUT = [3, 3, 7, 100], [7, 9, 9, 9, 500]
CASES = {
    "temperature": {"temperature": 1.3},
    "cold": {"temperature": 0.3},
    "top-k": {"top_k": 40},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "all filters": {"temperature": 1.7, "top_k": 60, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "top_p": 0.95},
    "bias": {"logit_bias": ((0, 4.0), (17, -100.0), (int(LOGITS.argmax()), -2.0)), "temperature": 0.8},
}


def bound(freedom: int) -> float:
    """Chi-square's quantile at 1 - 1e-6, by Wilson and Hilferty's cube."""
    return freedom * (1 - 2 / (9 * freedom) + 4.7534 * math.sqrt(2 / (9 * freedom))) ** 3


def expected_of(params: SamplingParams) -> dict[int, float]:
    return probabilities(edited(LOGITS.tolist(), params, PROMPT, OUTPUT), params)


def statistic(tokens: list[int], expected: dict[int, float]) -> tuple[float, int]:
    """(chi-square, degrees of freedom); tokens expected less than 10 times share a cell."""
    draws = len(tokens)
    counts = np.bincount(tokens, minlength=VOCAB)
    outside = [i for i in np.flatnonzero(counts).tolist() if i not in expected]
    if outside:
        return math.inf, 1
    cells, rare_found, rare_expected = [], 0, 0.0
    for i, share in expected.items():
        if share * draws >= 10:
            cells.append((int(counts[i]), share * draws))
        else:
            rare_found, rare_expected = rare_found + int(counts[i]), rare_expected + share * draws
    if rare_expected > 0:
        cells.append((rare_found, max(rare_expected, 1e-3)))
    return sum((found - wanted) ** 2 / wanted for found, wanted in cells), len(cells) - 1


def drawn(params: SamplingParams, fast=sample, draws: int = DRAWS) -> list[int]:
    """One seed, an index for each draw, as the tokens of one long request."""
    template = spec_of(params, PROMPT, OUTPUT)
    tokens: list[int] = []
    for start in range(0, draws, 2000):
        specs = [SampleSpec(params, start + i, (), template.edits) for i in range(2000)]
        tokens += [token for token, _ in fast(LOGITS.expand(2000, -1).clone(), specs)]
    return tokens


@pytest.fixture(scope="module")
def compiled(make_runner):
    if library.load() is None:
        pytest.skip("the kernels were not built, or this CPU lacks AVX2")
    model = make_runner("tiny", dtype="bfloat16")._model
    return lambda logits, specs: model._sample(logits, list(range(len(specs))), specs)


@pytest.mark.quick("temperature", "all filters", "penalties", "bias")
@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_distribution(case, compiled):
    params = SamplingParams(max_tokens=1 << 20, seed=20, **CASES[case])
    tokens = drawn(params, compiled)
    value, freedom = statistic(tokens, expected_of(params))
    assert value < bound(freedom)


def test_draws_of_torch_follow_the_distribution():
    """Fewer: they are slower, and equal those above to the token (test_native.py)."""
    params = SamplingParams(max_tokens=1 << 20, seed=21, **CASES["all filters"])
    value, freedom = statistic(drawn(params, draws=20_000), expected_of(params))
    assert value < bound(freedom)


def test_first_tokens_of_many_seeds_follow_the_distribution(compiled):
    """The other way to use the numbers: seed after seed, always index 0."""
    specs = [SampleSpec(SamplingParams(seed=seed), 0) for seed in range(DRAWS)]
    tokens: list[int] = []
    for start in range(0, DRAWS, 2000):
        tokens += [token for token, _ in compiled(LOGITS.expand(2000, -1).clone(), specs[start : start + 2000])]
    value, freedom = statistic(tokens, probabilities(LOGITS.tolist(), SamplingParams()))
    assert value < bound(freedom)


def _warmer(params: SamplingParams) -> SamplingParams:
    return SamplingParams(max_tokens=1 << 20, seed=params.seed, temperature=params.temperature * 1.05)


def _one_more(params: SamplingParams) -> SamplingParams:
    return SamplingParams(max_tokens=1 << 20, seed=params.seed, top_k=41)


def _never_the_rarest(params: SamplingParams) -> SamplingParams:
    return SamplingParams(max_tokens=1 << 20, seed=params.seed, top_p=0.99)


@pytest.mark.parametrize(
    ("asked", "mutant"),
    [({}, _warmer), ({"top_k": 40}, _one_more), ({}, _never_the_rarest)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_sampler_that_is_slightly_wrong_is_found(asked, mutant, compiled):
    params = SamplingParams(max_tokens=1 << 20, seed=20, **asked)
    value, freedom = statistic(drawn(mutant(params), compiled), expected_of(params))
    assert value > 2 * bound(freedom)


def test_one_number_for_neighbouring_tokens_is_found(monkeypatch):
    """A generator whose numbers come in pairs draws the right share of each token, with twice the variance."""
    monkeypatch.setattr(sampler, "uniform", lambda seed, index, true=sampler.uniform: true(seed, index // 2))
    params = SamplingParams(max_tokens=1 << 20, seed=20, temperature=1.3)
    value, freedom = statistic(drawn(params, draws=20_000), expected_of(params))
    assert value > bound(freedom)
