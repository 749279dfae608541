"""Drawing against a plain restatement of the rules, and against the distribution it must follow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.batch import SampleSpec
from pdserve.core.sampling import SamplingParams, uniform
from pdserve.engine.sampler import distribution, sample


def draw(logits: list[float], index: int = 0, banned: tuple[int, ...] = (), **params) -> int:
    (token,) = sample(torch.tensor([logits]), [SampleSpec(SamplingParams(**params), index, banned)])
    return token


def restated(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """The filters one after the other on a sorted list of (weight, id)."""
    top = max(logits)
    items = [(math.exp((x - top) / params.temperature), i) for i, x in enumerate(logits)]
    items.sort(key=lambda item: (-item[0], item[1]))
    if params.top_k:
        items = items[: params.top_k]
    total, reached, kept = sum(w for w, _ in items), 0.0, []
    for weight, i in items:
        if reached >= params.top_p * total * (1 - 1e-12) and params.top_p < 1.0:
            break
        kept.append((weight, i))
        reached += weight
    kept = [(w, i) for w, i in kept if w >= params.min_p * kept[0][0]]
    total = sum(w for w, _ in kept)
    return {i: w / total for w, i in sorted(kept, key=lambda item: item[1])}


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
    ids, weights = distribution(np.array(logits), params)
    expected = restated(logits, params)
    assert ids.tolist() == list(expected)
    np.testing.assert_allclose(weights / weights.sum(), list(expected.values()), rtol=1e-9)


@settings(max_examples=100, deadline=None)
@given(logits=st.lists(st.floats(-6, 6), min_size=2, max_size=30), seed=st.integers(0, 2**64 - 1), index=st.integers(0, 99))
def test_the_draw_inverts_the_cumulative_distribution_by_ascending_id(logits, seed, index):
    logits = torch.tensor(logits).tolist()  # as float32 holds them
    token = draw(logits, index, seed=seed, temperature=0.9)
    probabilities = restated(logits, SamplingParams(temperature=0.9))
    below = sum(p for i, p in probabilities.items() if i < token)
    assert below - 1e-9 <= uniform(seed, index) <= below + probabilities[token] + 1e-9


def test_greedy_takes_the_lowest_of_equal_ids_even_in_a_large_vocabulary():
    logits = torch.zeros(3, 50_000)
    logits[0, [49_999, 31_000, 17]] = 5.0
    logits[1, [40_000, 33_333]] = 5.0
    spec = SampleSpec(SamplingParams(temperature=0.0), 0)
    assert sample(logits, [spec] * 3) == [17, 33_333, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_ids_are_never_drawn(temperature):
    logits = [9.0, 8.0, 1.0, 1.0]
    drawn = {draw(logits, i, (0, 1, 77), temperature=temperature) for i in range(50)}
    assert drawn <= {2, 3}


def test_a_tiny_temperature_is_greedy_and_overflows_nothing():
    with np.errstate(all="raise", under="ignore"):
        assert draw([1.0, 3.0, 2.0], temperature=5e-324) == 1


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 500, generator=generator) * 3
    specs = [SampleSpec(SamplingParams(seed=i, top_p=0.9, top_k=i * 20, temperature=i % 3 / 2), i) for i in range(9)]
    together = sample(logits.clone(), specs)
    alone = [sample(logits[i : i + 1].clone(), [specs[i]])[0] for i in reversed(range(9))]
    assert together == alone[::-1]


def test_draws_follow_the_distribution():
    """Chi-square over 20,000 draws; the seed is fixed, so this cannot fail by chance."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, 0.5, 3.0]])
    params = SamplingParams(seed=12345, temperature=1.3, top_k=5)
    expected = restated(logits[0].tolist(), params)
    count = 20_000
    drawn = sample(logits.expand(count, -1).clone(), [SampleSpec(params, i) for i in range(count)])
    found = np.bincount(drawn, minlength=6)
    assert found[3] == 0
    statistic = sum((found[i] - count * p) ** 2 / (count * p) for i, p in expected.items())
    assert statistic < 18.5, "0.999 quantile for 4 degrees of freedom"
