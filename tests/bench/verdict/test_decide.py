"""The decision: cases by hand, properties of the intervals, constraints and doubts."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from results import META, degrees, layout, measured, point, result, usual

from pdserve_bench.layout import Slo
from pdserve_bench.search.result import GoodputResult
from pdserve_bench.verdict import words
from pdserve_bench.verdict.data import Binding, DecisionData, EstimateData, VerdictData
from pdserve_bench.verdict.decide import decide, find_constraint
from pdserve_bench.verdict.points import ratio_of

TWO, ONE, OTHER = layout(2, 2), layout(0, 4), layout(1, 3)


@pytest.mark.parametrize(
    ("two", "one", "decision", "chosen"),
    [
        ((15, 14.5, 15.5), (10, 9.7, 10.3), DecisionData.DISAGGREGATE, TWO),
        ((8, 7.8, 8.2), (10, 9.7, 10.3), DecisionData.COLOCATE, ONE),
        ((10.5, 9.5, 11.5), (10, 9.2, 10.8), DecisionData.UNDECIDED, ONE),
        ((10.05, 10, 10.1), (10, 9.9, 10.1), DecisionData.EQUAL, ONE),
        ((10, 9.5, 10.5), None, DecisionData.ONE_SIDE, TWO),
        (None, (10, 9.5, 10.5), DecisionData.ONE_SIDE, ONE),
        ((5, 4.8, 5.2), (0, 0, 1), DecisionData.DISAGGREGATE, TWO),
        ((5, 4.8, 5.2), (0, 0, 9), DecisionData.UNDECIDED, ONE),
        ((0, 0, 1), (5, 4.8, 5.2), DecisionData.COLOCATE, ONE),
        ((0, 0, 0), (0, 0, 0), DecisionData.NOTHING, ONE),
        ((0, 0, math.inf), (0, 0, 2), DecisionData.OPEN, ONE),
        ((12, 11.5, math.inf), (10, 9.7, 10.3), DecisionData.DISAGGREGATE, TWO),
        ((12, 11.5, 12.5), (10, 9.7, math.inf), DecisionData.UNDECIDED, ONE),
        (None, None, DecisionData.UNMEASURED, None),
    ],
)
def test_a_case_has_its_decision(two, one, decision, chosen):
    sides = [measured(at, *numbers) for at, numbers in ((TWO, two), (ONE, one)) if numbers is not None]
    found = decide(result(*sides))
    assert (found.decision, found.chosen and found.chosen.layout) == (decision, chosen)
    assert words.headline(found)
    assert all(words.reasons(found))


def test_a_layout_that_may_still_be_the_best_keeps_the_answer_open():
    """The best colocated layout loses clearly, but another one was hardly measured."""
    found = decide(
        result(measured(TWO, 12, 11.8, 12.2), measured(ONE, 10, 9.8, 10.2), measured(layout(0, 4, 128), 9, 1, 20, False))
    )
    assert found.decision is DecisionData.UNDECIDED


def test_rates_that_nobody_decided_are_not_said_to_miss_the_targets():
    sides = [measured(at, 0, 0, math.inf, False) for at in (TWO, ONE)]
    found = decide(result(*sides, points=tuple(point(at, 5, 1.0, requests=17) for at in (TWO, ONE)), complete=False))
    said = " ".join([words.headline(found), *words.reasons(found)])
    assert found.decision is DecisionData.OPEN
    assert "fewer than" not in said
    assert "Expect" not in said


def test_refused_points_alone_say_nothing_about_the_targets():
    found = decide(result(points=(point(TWO, 5, 0.0, refused="the generator was late"),), complete=False))
    assert found.decision is DecisionData.UNMEASURED
    assert "met" not in " ".join(words.reasons(found))
    assert "the generator was late" in " ".join(map(words.doubt, found.doubts))


def test_an_interrupted_search_says_so():
    whole = decide(usual())
    cut = decide(replace(usual(), complete=False))
    assert "incomplete" not in {one.name for one in whole.doubts}
    assert cut.doubts[0].serious
    assert "incomplete" in {one.name for one in cut.doubts}


Ends = st.tuples(*[st.floats(0.01, 100)] * 3).map(sorted)


def ordered(decision: DecisionData) -> int:
    return {DecisionData.COLOCATE: -1, DecisionData.DISAGGREGATE: 1}.get(decision, 0)


@given(Ends, Ends, st.floats(1, 3))
def test_a_better_interval_of_two_pools_never_turns_the_answer_against_them(two, one, more):
    below = decide(result(measured(TWO, two[1], two[0], two[2]), measured(ONE, one[1], one[0], one[2]))).decision
    better = [more * end for end in two]
    above = decide(result(measured(TWO, better[1], better[0], better[2]), measured(ONE, one[1], one[0], one[2]))).decision
    assert ordered(above) >= ordered(below)


@given(Ends, Ends)
def test_the_interval_of_the_ratio_holds_it_and_turns_around_with_it(two, one):
    above, below = (EstimateData(middle, low, high) for low, middle, high in (two, one))
    there, back = ratio_of(above, below), ratio_of(below, above)
    assert there.low <= there.value <= there.high
    assert there.low == pytest.approx(1 / back.high)
    assert there.low >= above.low / below.high * (1 - 1e-9)  # never wider than the two extremes
    assert there.high <= above.high / below.low * (1 + 1e-9)


@pytest.mark.parametrize(
    ("at", "figures", "binding"),
    [
        (TWO, {"ttft_p99_s": 3.0, "prefill_busy_share": 0.97}, Binding.PREFILL_COMPUTE),
        (TWO, {"ttft_p99_s": 3.0}, Binding.PREFILL_COMPUTE),
        (TWO, {"ttft_p99_s": 3.0, "prefill_busy_share": 0.3}, Binding.MEMORY_OR_ROUTER),
        (TWO, {"ttft_p99_s": 3.0, "prefill_busy_share": 0.3, "tpot_p50_s": 0.099}, Binding.SEQUENCES),
        (TWO, {"tpot_p99_s": 0.2}, Binding.DECODE_BANDWIDTH),
        (TWO, {"tpot_p99_s": 0.2, "exposed_transfer_p50_s": 3.0}, Binding.LINK),
        (ONE, {"tpot_p99_s": 0.2, "itl_p50_s": 0.02}, Binding.INTERFERENCE),
        (ONE, {"tpot_p99_s": 0.2, "itl_p50_s": 0.06}, Binding.DECODE_BANDWIDTH),
        (ONE, {"ttft_p99_s": 3.0, "decode_busy_share": 0.95}, Binding.PREFILL_COMPUTE),
    ],
)
def test_the_first_point_that_misses_shows_what_binds(at, figures, binding):
    seen = [point(at, 8, 0.99), point(at, 10, 0.5, **figures), point(at, 12, 0.1, tpot_p99_s=9.0, ttft_p99_s=90.0)]
    found = find_constraint(seen, False, Slo(1.0, 0.05), 0.9, 128)
    assert (found.binding, found.rate_per_s) == (binding, 10)
    assert all(words.constraint(found))


def test_a_late_generator_binds_where_no_point_missed():
    assert find_constraint([point(TWO, 8, 0.99)], True, Slo(), 0.9, 128).binding is Binding.GENERATOR
    assert find_constraint([point(TWO, 8, 0.99)], False, Slo(), 0.9, 128).binding is Binding.UNSEEN


def names(found: VerdictData) -> set[str]:
    return {one.name for one in found.doubts}


def altered(**meta: object) -> GoodputResult:
    return replace(usual(), meta={**META, **meta})


@pytest.fixture(scope="module")
def clean() -> VerdictData:
    return decide(altered(hardware={"gpu": "an H100"}))


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (altered(hardware={"cores": 2, "load_average": 1.9, "gpu": "an H100"}), "busy"),
        (altered(cluster={"hosts": 1}), "one_host"),
        (usual(width=0.4), "wide"),
        (replace(usual(), slo=Slo(0.16, 0.03)), "ttft_close"),
        (replace(usual(), slo=Slo(1.0, 0.012)), "tpot_close"),
        (replace(usual(), points=usual().points[:2]), "few_points"),
        (result(measured(TWO, 5, 4, 6, False), measured(ONE, 3, 2, 4)), "unsettled"),
        (result(measured(TWO, 5, 4, math.inf), measured(ONE, 3, 2, 4)), "no_upper_end"),
        (result(measured(TWO, 5, 4, 6), points=(point(TWO, 5, 0.9, refused="late"),)), "refused"),
        (result(measured(TWO, 5, 4, 6), points=(point(TWO, 5, 0.9, requests=20),)), "few_requests"),
        (result(measured(TWO, 5, 4, 6), points=(point(TWO, 5, 0.9, disaggregated_share=0.9),)), "mixed"),
        (result(measured(TWO, 5, 4, 6), points=(point(TWO, 5, 0.9),)), "undecided_points"),
        (result(measured(TWO, 5, 4, 6), points=(point(TWO, 5, 0.5), point(TWO, 5, 0.95))), "not_stationary"),
        (result(measured(TWO, 5, 4, 6), points=(point(TWO, 5, 0.5), point(TWO, 6, 0.95))), "rising"),
        (result(measured(TWO, 5, 4.9, 5.1), measured(OTHER, 4.9, 4.8, 5)), "rivals"),
    ],
)
def test_a_weakness_is_a_doubt_and_has_a_sentence(made, name, clean):
    found = decide(made)
    assert name in names(found)
    assert name not in names(clean)
    assert all(words.doubt(one) for one in found.doubts)


def test_money_is_by_dollar_only_with_a_price():
    free, paid = decide(usual()).cost, decide(usual(), 2.0).cost
    assert free.tokens_per_dollar is None
    assert paid.tokens_per_dollar.value == pytest.approx(paid.tokens_per_worker_hour.value / 2)
    assert paid.output_tokens_per_s * 3600 / 4 == pytest.approx(paid.tokens_per_worker_hour.value)


def test_unknown_meta_is_unknown_and_never_an_error():
    for meta in ({}, {"hardware": 7}, {"hardware": {"cores": "many", "load_average": [None]}, "seed": [1], "model": None}):
        assert decide(replace(usual(), meta=dict(meta))).conditions["workload"].startswith("kind random")


def test_the_tokens_of_a_prompt_are_those_of_the_workload_where_the_meta_has_none():
    bare = replace(usual(), meta={})
    assert decide(bare).fit.prompt_tokens == 1024
    assert decide(replace(bare, workload={"source": {"prompt": {"kind": "lognormal"}}})).fit.prompt_tokens is None


def test_refused_points_change_no_figure():
    clean = usual()
    wild = replace(point(TWO, 11.5, 0.0, ttft_p99_s=99.0, itl_p99_s=99.0), refused="the generator was late")
    found, base = decide(replace(clean, points=(*clean.points, wild))), decide(clean)
    assert (found.compared, found.moved, found.cost, found.fit) == (base.compared, base.moved, base.cost, base.fit)


def test_the_money_follows_from_the_nearest_point_and_the_baseline_is_another_layout():
    """5 requests/s of 128 tokens on 2 workers are 1,152,000 tokens a worker-hour, although the point was at 4 requests/s."""
    points = (point(TWO, 4, 0.95), point(ONE, 3, 0.95), point(ONE, 9, 0.2, requests=50, refused="late"))
    found = decide(result(measured(TWO, 5, 4.8, 5.2), measured(ONE, 3, 2.9, 3.1), points=points))
    assert found.cost is not None
    assert found.cost.tokens_per_worker_hour.value == pytest.approx(5 * 128 * 3600 / TWO.workers)
    assert found.cost.baseline_tokens_per_worker_hour is not None
    assert found.requests == 800
    alone = decide(result(measured(TWO, 3, 2.9, 3.1), measured(ONE, 5, 4.8, 5.2), points=points))
    assert alone.cost is not None
    assert alone.cost.baseline_tokens_per_worker_hour is None


def test_a_degree_pays_if_a_core_of_it_clearly_serves_more():
    found = decide(degrees())
    told = {one.place: (one.ranks, one.least_ranks, one.pays) for one in found.degrees}
    assert told == {"prefill": (2, 1, None), "decode": (2, 1, None), "colocated": (2, 1, False)}
    (colocated,) = (one for one in found.degrees if one.place == "colocated")
    assert (colocated.each.value, colocated.least_each.value) == (5.0 / 4, 8.0 / 4)
    sure = replace(degrees(), layouts=tuple(one for one in degrees().layouts if one.layout.decode_ranks == 1))
    assert [(one.place, one.pays) for one in decide(sure).degrees] == [("prefill", True)]
    said = words.reasons(decide(sure))
    assert (
        "TP 2 for prefill workers pays beside TP 1: 1P(2 ranks)+2D serves 3 (2.92 to 3.07) requests/s a core, and 2P+2D 2.1 "
        "(2.05 to 2.15), 1.43 times as many; 95 % interval of the ratio: 1.38 to 1.48." in said
    )
    assert any("--set prefill.engine.tensor_parallel_size=2. Expect" in one for one in said)
    assert decide(usual()).degrees == ()


def test_gangs_cost_their_ranks_and_have_no_model_of_equal_workers():
    """A gang of two counted as one worker, so that its tokens seemed to cost half."""
    found = degrees()
    gang = next(one for one in found.layouts if one.layout.prefill_ranks == 2 and one.layout.disaggregated)
    made = decide(replace(found, layouts=tuple(one for one in found.layouts if one.layout.degrees in ((1, 1), (2, 1)))), 2.0)
    assert (made.chosen is not None and made.chosen.layout, made.fit, made.flips) == (gang.layout, None, ())
    assert made.cost is not None
    assert made.cost.tokens_per_worker_hour.value == pytest.approx(gang.goodput_per_s * 128 * 3600 / 4)
