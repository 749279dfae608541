"""Rows of logits with every kind of sampling, for tests of whoever draws from them; and each rule restated by loops."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from pdserve.core.sampling import GREEDY_BELOW, SamplingParams, edits_of
from pdserve.core.step_plan import SampleSpec


def spec_of(params: SamplingParams, prompt: list[int], output: list[int], banned: tuple[int, ...] = ()) -> SampleSpec:
    edits = edits_of(params, len(prompt))
    if edits is not None:
        edits.catch_up([*prompt, *output])
    return SampleSpec(params, len(output), banned, edits)


@st.composite
def params_strategy(draw: st.DrawFn, vocab: int) -> SamplingParams:
    biases = st.dictionaries(st.integers(0, vocab - 1), st.sampled_from([-100.0, -1.5, 0.1, 3.0]), max_size=4)
    return SamplingParams(
        max_tokens=1 << 20,
        temperature=draw(st.sampled_from([0.0, 0.1, 0.7, 1.0, 2.0, GREEDY_BELOW])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 7, 8, 50, vocab + 1])),
        top_p=draw(st.sampled_from([0.05, 0.5, 0.931, 1.0, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.03, 0.41, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.4, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.3, -0.7])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7])),
        logit_bias=tuple(draw(biases).items()),
        logprobs=draw(st.sampled_from([None, None, 0, 1, 20])),
    )


@st.composite
def sampling_cases(draw: st.DrawFn, vocab: int, rows: int = 5) -> tuple[Tensor, list[SampleSpec]]:
    """([rows, vocab] float32, a spec for each row): mixed kinds, many equal logits."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**63)))
    spread = draw(st.sampled_from([0.0, 0.5, 4.0, 100.0]))
    logits = (torch.randn(rows, vocab, generator=generator) * spread).round(decimals=1)
    ids = st.lists(st.integers(0, vocab - 1), max_size=12)
    banned = st.sampled_from([(), (0, vocab - 1, vocab + 7)])
    return logits, [spec_of(draw(params_strategy(vocab)), draw(ids), draw(ids), draw(banned)) for _ in range(rows)]


def probabilities(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """By id, what may be drawn: the filters one after the other on a sorted list of (weight, id), in float64."""
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


def edited(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Bias and penalties id by id, in float64."""
    biases = dict(params.logit_bias)
    result = []
    for i, x in enumerate(logits):
        x += biases.get(i, 0.0)
        if i in prompt or i in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(i)
        x -= params.presence_penalty * (i in output)
        result.append(x)
    return result
