"""Sampling parameters refuse what makes no sense, and draws depend on seed and index alone."""

import math

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import GREEDY_BELOW, LEAST_REAL, SamplingParams, uniform


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1 << 40),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_k", -1),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", 1 << 64),
        ("min_tokens", 17),
        ("stop", ("",)),
        ("stop", ("x",) * 17),
        ("stop", ("x" * 2000,)),
        ("stop_token_ids", tuple(range(300))),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.01),
        ("logit_bias", tuple((i, 0.0) for i in range(301))),
        ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logprobs", -1),
        ("logprobs", 21),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value):
    with pytest.raises(InvalidRequest, match=field) as caught:
        SamplingParams(**{"max_tokens": 16, field: value})
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "edits", "plain"),
    [
        ({"temperature": 0.0}, False, True),
        ({"temperature": 0.0, "top_p": 0.5, "seed": 3}, False, True),
        ({}, False, False),
        ({"temperature": 0.0, "logprobs": 0}, False, False),
        ({"temperature": 0.0, "presence_penalty": -0.1}, True, False),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, True, False),
        ({"temperature": 0.0, "repetition_penalty": 0.9}, True, False),
        ({"temperature": 0.0, "logit_bias": ((0, 0.0),)}, True, False),
    ],
)
def test_who_is_plainly_greedy_and_who_changes_logits(fields, edits, plain):
    params = SamplingParams(**fields)
    assert (params.edits_logits, params.plainly_greedy) == (edits, plain)


def test_almost_greedy_values_are_greedy_as_at_openai_and_vllm():
    """1e-8, which scripts write for a model that forbids 0, was refused, and so was `top_p: 0`."""
    assert SamplingParams(temperature=9.9e-6).greedy
    assert not SamplingParams(temperature=GREEDY_BELOW).greedy
    assert SamplingParams(temperature=1e-8) == SamplingParams(temperature=0.0)
    assert SamplingParams(top_p=0.0) == SamplingParams(top_p=LEAST_REAL)
    assert SamplingParams(min_p=1e-9) == SamplingParams(min_p=0.0)
    for field in ("temperature", "top_p", "min_p"):
        for value in (-5e-324, -1e-9, math.nan):
            with pytest.raises(InvalidRequest, match=rf"^{field}: must be a number in \[0, "):
                SamplingParams(**{field: value})


def test_draws_are_uniform_and_unrelated_between_neighbours():
    draws = [uniform(seed, index) for seed in range(100) for index in range(100)]
    assert all(0 <= u < 1 for u in draws)
    assert len(set(draws)) == len(draws)
    buckets = [0] * 20
    for u in draws:
        buckets[int(u * 20)] += 1
    chi_square = sum((n - 500) ** 2 / 500 for n in buckets)
    assert chi_square < 43.8, "19 degrees of freedom: above this once in a thousand, and the draws are fixed"
    pairs = [(uniform(s, i), uniform(s, i + 1)) for s in range(100) for i in range(99)]
    mean = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)
    assert abs(mean) * 12 < 0.05
