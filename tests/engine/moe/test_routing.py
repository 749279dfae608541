"""The router of a mixture of experts: experts and weights of each row, against loops over Python floats."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_reference import chosen, routed

from pdserve.core.model_spec import MoeSpec
from pdserve.engine.layers.moe import choose, route


@st.composite
def specs(draw: st.DrawFn) -> MoeSpec:
    groups, size = draw(st.sampled_from([1, 2, 4])), draw(st.integers(2, 5))
    top_groups = draw(st.integers(1, groups))
    return MoeSpec(
        experts=groups * size,
        experts_per_token=draw(st.integers(1, top_groups * size)),
        intermediate=1,
        score=draw(st.sampled_from(["softmax", "sigmoid"])),
        renormalise=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        correction_bias=draw(st.booleans()),
        groups=groups,
        top_groups=top_groups,
        group_score=draw(st.sampled_from(["best", "best_two"])),
    )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_equal_ranks_choose_the_lowest_experts_and_the_lowest_groups(data):
    spec = data.draw(specs())
    row = st.lists(st.integers(-1, 1), min_size=spec.experts, max_size=spec.experts)
    ranks = data.draw(st.lists(row, min_size=1, max_size=6))
    found = choose(spec, torch.tensor(ranks, dtype=torch.float32)).tolist()
    assert found == [chosen(spec, one) for one in ranks]


@settings(max_examples=30, deadline=None)
@given(spec=specs(), seed=st.integers(0, 2**31))
def test_weights_equal_loops_over_floats(spec, seed):
    generator = torch.Generator().manual_seed(seed)
    outputs = 3 * torch.randn(7, spec.experts, generator=generator)
    bias = torch.randn(spec.experts, generator=generator) if spec.correction_bias else None
    experts, weights = route(spec, outputs, bias)
    for row, of_experts, of_weights in zip(outputs.tolist(), experts.tolist(), weights.tolist(), strict=True):
        expected = routed(spec, row, None if bias is None else bias.tolist())
        assert of_experts == sorted(expected)
        assert of_weights == pytest.approx([expected[expert] for expert in of_experts], rel=1e-5, abs=1e-7)


@settings(max_examples=60, deadline=None)
@given(spec=specs(), bad=st.sets(st.integers(0, 5), min_size=1), kind=st.sampled_from([math.nan, math.inf, -math.inf]))
def test_a_row_that_is_no_number_gets_valid_experts_and_changes_no_other_row(spec, bad, kind):
    outputs = torch.randn(6, spec.experts, generator=torch.Generator().manual_seed(3))
    whole = route(spec, outputs, None)
    broken = outputs.clone()
    broken[list(bad), spec.experts // 2] = kind
    experts, weights = route(spec, broken, None)
    kept = [row for row in range(6) if row not in bad]
    assert torch.equal(experts[kept], whole[0][kept])
    assert torch.equal(weights[kept], whole[1][kept])
    for row in experts.tolist():
        assert row == sorted(set(row))
        assert row[0] >= 0
        assert row[-1] < spec.experts
    if math.isnan(kind):
        touched = (experts == spec.experts // 2).any(-1).tolist() if spec.score == "sigmoid" else [True] * 6
        assert weights.isnan().any(-1).tolist() == [row in bad and touched[row] for row in range(6)]


def test_a_row_of_nan_alone_has_weights_of_nan():
    """The sum of its experts is no number then, and the engine draws no token for it."""
    for score in ("softmax", "sigmoid"):
        spec = MoeSpec(experts=4, experts_per_token=2, intermediate=1, score=score)
        assert route(spec, torch.full((1, 4), math.nan), None)[1].isnan().all()


def test_a_correction_changes_the_choice_and_no_weight():
    spec = MoeSpec(3, 1, 1, score="sigmoid", renormalise=False, correction_bias=True)
    outputs = torch.tensor([[2.0, 1.0, 0.0]])
    experts, weights = route(spec, outputs, torch.tensor([0.0, 0.0, 1.0]))
    assert experts.tolist() == [[2]]
    assert weights.item() == 0.5


def test_scores_that_underflow_divide_by_no_zero():
    spec = MoeSpec(3, 2, 1, score="sigmoid")
    assert route(spec, torch.full((1, 3), -200.0), None)[1].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_one_expert_and_all_experts(score):
    outputs = torch.randn(5, 4, generator=torch.Generator().manual_seed(4))
    every = MoeSpec(4, 4, 1, score=score)
    experts, weights = route(every, outputs, None)
    assert experts.tolist() == [[0, 1, 2, 3]] * 5
    torch.testing.assert_close(weights.sum(-1), torch.ones(5))
    experts, weights = route(replace(every, experts=1, experts_per_token=1), outputs[:, :1], None)
    assert experts.tolist() == [[0]] * 5
    assert weights.tolist() == [[1.0]] * 5
