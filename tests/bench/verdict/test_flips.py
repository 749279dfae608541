"""The calibrated model: it finds the times of a cluster of known times, and its flips lie where the ratio crosses 1."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from results import Machine, figures, layout, point, searched, usual

from pdserve_bench.layout import Slo
from pdserve_bench.verdict import model, words
from pdserve_bench.verdict.data import DecisionData, EstimateData, Fit
from pdserve_bench.verdict.decide import decide
from pdserve_bench.verdict.model import LEVERS, MOST_FACTOR, Scenario, crossing, flips, relative

FIT = Fit(0.12, 0.16, 0.12, 0.010, 0.0006, 0.006, 128.0, 1024.0, 1.0, 1.0)
NOW = Scenario(4, 1.0, 0.03, 0.9, 64)


def test_the_fit_finds_the_times_of_a_known_cluster():
    machine = Machine(prompt_s=0.2, step_s=0.008, sequence_s=0.0003)
    points = []
    for at in (layout(2, 2, 1024), layout(0, 4, 1024)):
        rates = (2.0, 4.0, 6.0)
        points += [replace(point(at, rate, 1.0), figures=figures(machine, at, rate)) for rate in rates]
    found = model.fit(points, 1024)
    assert found.prompt_s == pytest.approx(0.2, rel=0.05)
    assert found.step_s == pytest.approx(0.008, rel=0.02)
    assert found.sequence_s == pytest.approx(0.0003, rel=0.05)
    assert found.delay_s == pytest.approx(0.2, rel=0.1)
    assert found.output_tokens == 128


def test_one_kind_of_layout_alone_gives_no_fit():
    assert model.fit([point(layout(2, 2), 5, 1.0)], None) is None
    assert model.fit([], None) is None


Factor = st.floats(1.0, 16.0)


@given(Factor, Factor)
@settings(max_examples=40)
def test_more_of_a_good_thing_never_lowers_the_goodput_of_the_model(one, other):
    low, high = sorted((one, other))
    for change in (
        lambda f: replace(NOW, tpot_s=0.02 * f),
        lambda f: replace(NOW, ttft_s=0.2 * f),
        lambda f: replace(NOW, workers=round(2 * f)),
        lambda f: replace(NOW, link=f),
        lambda f: replace(NOW, prompt=1 / f),
    ):
        assert model.apart(FIT, change(high)) >= model.apart(FIT, change(low)) * (1 - 1e-9)
        assert model.together(FIT, change(high)) >= model.together(FIT, change(low)) * (1 - 1e-6)


@given(st.floats(0.5, 2.0), st.sampled_from([DecisionData.DISAGGREGATE, DecisionData.COLOCATE]))
@settings(max_examples=15)
def test_a_flip_lies_where_the_ratio_crosses_one(level, to):
    level = 1 / level if (level > 1) == (to is DecisionData.DISAGGREGATE) else level
    fitted = replace(FIT, apart_error=1.0, together_error=1.0)
    decision = DecisionData.COLOCATE if to is DecisionData.DISAGGREGATE else DecisionData.DISAGGREGATE
    present = relative(fitted, NOW)
    for flip in flips(fitted, NOW, EstimateData(level, level * 0.97, level * 1.03), decision):
        lever = next(one for one in LEVERS if one.name == flip.lever)
        assert flip.to is to
        assert words.flip(flip)
        if flip.lever == "workers":
            continue
        there = level * relative(fitted, lever.change(NOW, flip.factor)) / present
        assert there >= 1 if to is DecisionData.DISAGGREGATE else there <= 1
        before = math.exp(math.log(flip.factor) * 0.99)
        here = level * relative(fitted, lever.change(NOW, before)) / present
        assert here <= 1.03 if to is DecisionData.DISAGGREGATE else here >= 0.97


def test_a_crossing_of_a_known_curve_is_exact_and_ends_at_the_range():
    assert crossing(lambda f: f, 0.5, DecisionData.DISAGGREGATE, 1) == pytest.approx(2, rel=1e-3)
    assert crossing(lambda f: f, 0.5, DecisionData.DISAGGREGATE, -1) is None
    assert crossing(lambda f: f, 1 / (MOST_FACTOR + 1), DecisionData.DISAGGREGATE, 1) is None
    assert crossing(lambda f: None if f > 1.5 else f, 0.5, DecisionData.DISAGGREGATE, 1) is None
    assert crossing(lambda f: f, 0.0, DecisionData.DISAGGREGATE, 1) is None
    assert crossing(lambda f: f, math.inf, DecisionData.COLOCATE, -1) is None


def test_a_model_that_is_far_off_estimates_nothing():
    ratio = EstimateData(1.2, 1.1, 1.3)
    assert flips(replace(FIT, apart_error=3.5), NOW, ratio, DecisionData.DISAGGREGATE) == ()
    assert flips(replace(FIT, together_error=None), NOW, ratio, DecisionData.DISAGGREGATE) == ()
    assert flips(FIT, NOW, ratio, DecisionData.DISAGGREGATE) != ()


def test_an_open_answer_names_what_would_decide_it():
    found = decide(usual(width=0.3))
    assert found.decision is DecisionData.UNDECIDED
    assert {one.to for one in found.flips} <= {DecisionData.DISAGGREGATE, DecisionData.COLOCATE}
    assert all(one.low is None for one in found.flips)


def test_a_clear_win_is_farther_from_its_flip_than_a_narrow_one():
    strong = decide(searched(Machine(interference=2.5), [layout(2, 2), layout(0, 4)], Slo(1.0, 0.03)))
    weak = decide(usual())
    assert strong.decision is weak.decision is DecisionData.DISAGGREGATE
    assert strong.ratio.value > weak.ratio.value
    assert abs(math.log(strong.flips[0].factor)) > abs(math.log(weak.flips[0].factor))
