"""At the edges of what sampling fields may be, the real samplers still draw: no NaN, no overflow, no token by default."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from sampling_cases import spec_of
from torch import Tensor

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import GREEDY_BELOW, LEAST_REAL, LEAST_REPETITION_PENALTY, SamplingParams
from pdserve.core.step_plan import SampleSpec
from pdserve.engine.native import library
from pdserve.engine.sampler import _edit, sample, weigh

VOCAB = 512
LARGEST_LOGIT = 1e6
SAID: list[int] = [3, 5, 5, 9, 300]
HEARD: list[int] = [5, 7, 7, 7, 511]

RANGES = {
    "temperature": (GREEDY_BELOW, 2.0, True),
    "top_p": (LEAST_REAL, 1.0, False),
    "min_p": (LEAST_REAL, 1.0, True),
    "repetition_penalty": (LEAST_REPETITION_PENALTY, 2.0, False),
    "presence_penalty": (-2.0, 2.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
}
"""The least, the largest, and whether 0 is allowed as well."""


def within(low: float, high: float, zero: bool) -> st.SearchStrategy[float]:
    edges = st.sampled_from([low, high, math.nextafter(low, high), 0.0 if zero else low])
    return edges | st.floats(low, high)


@st.composite
def any_accepted(draw: st.DrawFn) -> SamplingParams:
    fields = {name: draw(within(*limits)) for name, limits in RANGES.items()}
    biases = st.dictionaries(st.integers(0, VOCAB - 1), within(-100.0, 100.0, True), max_size=8)
    top_k, seed = draw(st.sampled_from([0, 1, 2, VOCAB, 1 << 31])), draw(st.integers(0, 2**64 - 1))
    bias = tuple(draw(biases).items())
    return SamplingParams(max_tokens=100, top_k=top_k, seed=seed, logit_bias=bias, **fields)


@st.composite
def rows(draw: st.DrawFn) -> Tensor:
    """[1, VOCAB] float32: flat, peaked, huge, or with equals at the top."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**63)))
    spread = draw(st.sampled_from([0.0, 1e-30, 1.0, 30.0, LARGEST_LOGIT / 8]))
    logits = torch.randn(1, VOCAB, generator=generator) * spread
    if draw(st.booleans()):
        logits[0, draw(st.integers(0, VOCAB - 1))] = draw(st.sampled_from([LARGEST_LOGIT, -LARGEST_LOGIT]))
    return logits.clamp(-LARGEST_LOGIT, LARGEST_LOGIT)


def weights_of(logits: Tensor, spec: SampleSpec) -> Tensor:
    """[VOCAB]: e^((x - largest) / temperature) after the edits; of a greedy row, what is largest."""
    edited = logits[0].clone()
    _edit(edited, spec)
    assert torch.isfinite(edited).all(), "an edit overflowed"
    if spec.params.greedy:
        return (edited == edited.amax()).float()
    return weigh(edited[None], [spec.params.temperature])[0]


@pytest.fixture(scope="module")
def compiled(make_runner):
    if library.load() is None:
        return None
    model = make_runner("tiny", dtype="bfloat16")._model
    return lambda logits, specs: model._sample(logits, list(range(len(specs))), specs)


@settings(max_examples=300, deadline=None)
@given(logits=rows(), params=any_accepted())
@example(
    logits=torch.arange(VOCAB).float()[None],
    params=SamplingParams(max_tokens=100, repetition_penalty=LEAST_REPETITION_PENALTY, temperature=GREEDY_BELOW),
)
def test_no_accepted_combination_gives_nan_or_a_token_that_has_no_weight(compiled, logits: Tensor, params: SamplingParams):
    spec = spec_of(params, SAID, HEARD)
    weights = weights_of(logits, spec)
    assert not weights.isnan().any()
    assert float(weights.amax()) == 1.0, "the likeliest has the whole weight of itself"
    taken = sample(logits.clone(), [spec])
    assert weights[taken[0][0]] > 0
    if compiled is not None:
        assert compiled(logits.clone(), [spec]) == taken


@pytest.mark.parametrize("temperature", [GREEDY_BELOW, 1.0, 2.0])
def test_equals_at_the_top_are_all_drawn_at_any_temperature(temperature: float):
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 77, 500]] = 9e5
    specs = [SampleSpec(SamplingParams(temperature=temperature, seed=1), index) for index in range(60)]
    assert {token for token, _ in sample(logits.expand(60, -1).clone(), specs)} == {4, 77, 500}


@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("tiny", [1e-300, 5e-324, 1e-40, 1e-7])
def test_what_float32_cannot_hold_is_refused_by_name_or_taken_as_the_nearest_value(name: str, tiny: float):
    """A repetition_penalty of 1e-300 passed, and every draw was id 0."""
    low, high, _ = RANGES[name]
    if name != "repetition_penalty":
        taken = getattr(SamplingParams(**{name: tiny}), name)
        nearest = {"temperature": 0.0, "top_p": LEAST_REAL, "min_p": 0.0}.get(name, tiny)
        assert taken == nearest, "a difference that is too small to matter changes nothing"
        return
    with pytest.raises(InvalidRequest, match=f"{low:g}, {high:g}") as caught:
        SamplingParams(**{name: tiny})
    assert caught.value.field == name
    assert np.float32(low) > 0
    SamplingParams(**{name: low})
    SamplingParams(**{name: high})
