"""The search against simulated servers whose best layout and goodput are known."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve_bench.layout import Layout, Slo
from pdserve_bench.search.goodput import GoodputSearch, RunAction, StopAction, curve_of, falling_fit
from pdserve_bench.search.result import Point
from pdserve_bench.search.settings import SearchSettings
from tests.bench.search.servers import NO_FIGURES, Bench, Server, Station

ONE = Layout(0, 4, 512, 1)
MD4 = Server(Station(0.1, 4), prefill_wait_s=0.5)
TANDEM = Server(Station(0.1, 2), 0.5, Station(0.15, 4), 0.5)


def settings_of(server: Server, **changes: object) -> SearchSettings:
    slo = Slo(server.prefill_wait_s + server.prefill.service_s, None)
    values = {"first_rate_per_s": 5.0, "mean_output_tokens": 1.0, "max_point_s": 600.0, **changes}
    return SearchSettings(slo, 4, (0,), (512,), 512, 1, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(("server", "truth"), [(MD4, 37.9), (TANDEM, 17.88)], ids=["M/D/4", "tandem"])
def test_the_goodput_is_within_5_percent(server, truth):
    """`Server.goodput` gave the truth. For each server, 39 of 40 seeds were within 5 %, and 39 intervals held the truth."""
    assert server.attainment(truth) == pytest.approx(0.9, abs=0.015)
    found = []
    for seed in range(4):
        bench = Bench(settings_of(server, first_rate_per_s=truth * (0.1 + 0.5 * seed)), lambda layout: server, seed)
        points, stop = bench.search()
        (result,) = GoodputSearch(bench.settings).results(points)
        assert stop.complete
        assert result.settled
        assert result.low_per_s < result.high_per_s
        found.append(result.goodput_per_s / truth)
    assert sum(abs(one - 1.0) <= 0.05 for one in found) >= 3, found


CHUNK_COST = {128: 1.15, 256: 1.0, 512: 1.05, 1024: 1.2}


def split_server(layout: Layout) -> Server:
    """Return the server of a layout. Its chunks cost as the table says, and few sequences a step make steps longer."""
    chunk = CHUNK_COST[layout.chunk_tokens]
    batch = 1 + 0.3 * max(0.0, 16 / layout.max_num_seqs - 1)
    if layout.disaggregated:
        return Server(Station(0.05 * chunk, layout.prefill), 0.3, Station(0.12 * batch, layout.decode), 0.4)
    return Server(Station(0.2 * chunk * batch, layout.decode), 0.4)


TRUTH = {
    0: {128: 14.95, 256: 17.50, 512: 16.57, 1024: 14.25},
    1: {128: 14.01, 256: 16.57, 512: 15.63, 1024: 13.31},
    2: {128: 14.20, 256: 14.17, 512: 14.19, 1024: 14.20},
    3: {128: 5.98, 256: 5.98, 512: 5.98, 1024: 5.98},
}
"""The goodput of each split and chunk, from `Server.goodput`. It is the same from 16 sequences a step on."""


def split_settings(**changes: object) -> SearchSettings:
    values = {"first_rate_per_s": 5.0, "mean_output_tokens": 1.0, "max_point_s": 120.0, **changes}
    return SearchSettings(Slo(0.7, None), 4, (0, 2, 1, 3), (128, 256, 512, 1024), 512, 64, **values)  # type: ignore[arg-type]


def test_the_race_keeps_the_best_layout_of_both_families():
    """Of 40 seeds, the worst layout that was chosen had 94 % of the best goodput."""
    for seed in range(2):
        bench = Bench(split_settings(), split_server, seed)
        points, stop = bench.search()
        results = GoodputSearch(bench.settings).results(points)
        assert stop.complete
        for disaggregated in (False, True):
            best = next(one for one in results if one.layout.disaggregated is disaggregated)
            assert best.settled
            truth = TRUTH[best.layout.prefill][best.layout.chunk_tokens]
            assert best.layout.max_num_seqs >= 16
            assert truth >= 0.92 * (16.57 if disaggregated else 17.50)
            assert best.goodput_per_s == pytest.approx(truth, rel=0.1)
        assert len(points) < 80  # the grid of 16 layouts, each settled, takes 130 points


def test_a_hopeless_split_costs_one_point():
    bench = Bench(split_settings(), split_server, 2)
    points, _ = bench.search()
    assert sum(point.layout.prefill == 3 for point in points) == 1


def test_a_resumed_search_ends_as_an_uninterrupted_one():
    """Every prefix of the points leads to the same next step: the state is the list of points."""
    bench = Bench(split_settings(max_point_s=60.0), split_server, 4)
    points, stop = bench.search()
    for cut in range(0, len(points), 5):
        action = GoodputSearch(bench.settings).next(points[:cut])
        assert isinstance(action, RunAction)
        assert (action.layout, action.rate_per_s) == (points[cut].layout, points[cut].rate_per_s)
    assert GoodputSearch(bench.settings).next(points) == stop


@pytest.mark.parametrize("budget_s", [100.0, 600.0, 1800.0])
def test_the_budget_bounds_the_search_with_its_reshaping(budget_s):
    bench = Bench(split_settings(max_point_s=60.0), split_server, 5, reshape_s=10.0)
    _, stop = bench.search(budget_s)
    assert bench.spent_s <= budget_s
    assert "budget" in stop.reason
    assert not stop.complete


def test_half_of_the_usual_budget_settles_the_baseline_first():
    bench = Bench(split_settings(max_point_s=60.0), split_server, 5, reshape_s=10.0)
    points, _ = bench.search(900.0)
    results = GoodputSearch(bench.settings).results(points)
    assert next(one for one in results if not one.layout.disaggregated).settled
    assert points[0].layout == bench.settings.base(0)


def test_a_baseline_that_noise_keeps_open_leaves_the_other_family_its_share():
    """Points of the baseline that decide nothing use two thirds of the budget, and no more while the other family is open."""
    search = GoodputSearch(split_settings())
    base = search.settings.base(0)
    points = [Point(base, 5.0, 100, 90, 0.8, 0.95, 60.0, NO_FIGURES) for _ in range(10)]
    for left_s, disaggregated in ((320.0, False), (280.0, True)):
        action = search.next(points, left_s)
        assert isinstance(action, RunAction)
        assert action.layout.disaggregated is disaggregated


def test_targets_that_an_idle_cluster_misses_have_no_goodput():
    late = Server(Station(1.0, 4), prefill_wait_s=-0.5)
    bench = Bench(replace(settings_of(MD4), min_rate_per_s=1.0), lambda layout: late)
    points, stop = bench.search()
    (result,) = GoodputSearch(bench.settings).results(points)
    assert stop.complete
    assert (result.goodput_per_s, result.low_per_s, result.high_per_s, result.settled) == (0.0, 0.0, 1.0, True)


def test_a_rate_out_of_the_generators_reach_ends_the_steps_upwards():
    bench = Bench(settings_of(MD4), lambda layout: MD4, offered_per_s=25.0)
    points, stop = bench.search()
    assert not stop.complete
    assert "the generator cannot send" in stop.reason
    (result,) = GoodputSearch(bench.settings).results(points)
    assert result.high_per_s == math.inf
    assert not result.settled
    assert 23.0 <= result.low_per_s <= 25.0
    refused = [point.rate_per_s for point in points if point.refused]
    assert refused
    assert all(refused.count(rate) == 3 for rate in refused)


def test_a_generator_that_is_always_late_ends_the_search_with_that_reason():
    settings = split_settings(min_rate_per_s=1.0)
    points, stop = Bench(settings, split_server, offered_per_s=0.0).search()
    assert all(point.refused and point.rate_per_s >= 1.0 for point in points)
    assert isinstance(stop, StopAction)
    assert not stop.complete
    assert "the generator cannot send 1 requests a second" in stop.reason
    assert GoodputSearch(settings).results(points) == ()


def test_a_leader_without_a_decided_rate_has_no_challengers():
    settings = split_settings(min_rate_per_s=5.0)
    points = [Point(settings.base(0), 5.0 + n, 100, 90, 0.8, 0.95, 1.0, NO_FIGURES) for n in range(settings.max_points)]
    action = GoodputSearch(settings).next(points)
    assert isinstance(action, RunAction)
    assert action.layout.disaggregated
    assert action.rate_per_s > 0


def test_a_first_rate_out_of_the_generators_reach_is_halved():
    bench = Bench(settings_of(MD4, first_rate_per_s=200.0), lambda layout: MD4, offered_per_s=60.0)
    points, stop = bench.search()
    (result,) = GoodputSearch(bench.settings).results(points)
    assert stop.complete
    assert result.goodput_per_s == pytest.approx(37.9, rel=0.1)


def test_runs_too_short_to_decide_a_low_rate_end_the_search():
    slow = Server(Station(1.0, 4), prefill_wait_s=0.5)
    bench = Bench(settings_of(MD4, max_point_s=10.0, first_rate_per_s=20.0), lambda layout: slow)
    points, stop = bench.search()
    assert not stop.complete
    assert "too short to decide" in stop.reason
    assert all(point.rate_per_s * 10.0 > 70 for point in points)


def point(rate_per_s: float, low: float, high: float, *, overloaded: bool = False) -> Point:
    return Point(ONE, rate_per_s, 100, 90, low, high, 10.0, NO_FIGURES, overloaded=overloaded)


def test_points_that_contradict_each_other_are_both_inside_of_the_interval():
    points = [point(1.0, 0.95, 1.0), point(2.0, 0.5, 0.8), point(3.0, 0.95, 1.0), point(4.0, 0.5, 0.8)]
    curve = curve_of(points, 0.9)
    assert (curve.low_per_s, curve.high_per_s) == (1.0, 4.0)


def test_a_rate_is_kept_only_if_all_of_its_points_say_so():
    assert curve_of([point(1.0, 0.95, 1.0), point(1.0, 0.85, 0.95)], 0.9).low_per_s == 0.0
    assert curve_of([point(1.0, 0.95, 1.0), point(1.0, 0.5, 0.8)], 0.9).high_per_s == 1.0


def test_an_overload_is_a_no_whatever_its_interval():
    assert curve_of([point(1.0, 0.95, 1.0, overloaded=True)], 0.9).high_per_s == 1.0


@settings(max_examples=40)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(1, 100)), min_size=1, max_size=12))
def test_the_fit_never_rises_and_keeps_the_mean(pairs):
    values, weights = [value for value, _ in pairs], [weight for _, weight in pairs]
    fit = falling_fit(values, weights)
    assert all(left >= right - 1e-12 for left, right in pairwise(fit))
    mean = sum(value * weight for value, weight in pairs)
    assert sum(value * weight for value, weight in zip(fit, weights, strict=True)) == pytest.approx(mean)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"attainment": 1.0}, "attainment"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"first_rate_per_s": 0.0}, "first_rate"),
        ({"max_point_s": 0.1}, "max_point_s"),
    ],
)
def test_a_wrong_setting_is_named(changes, field):
    with pytest.raises(ConfigError, match=f"^{field}: "):
        settings_of(MD4, **changes)


def test_a_race_begins_only_if_a_new_leader_can_be_settled():
    settings = settings_of(MD4, first_rate_per_s=1.0)
    points = [point(1.0, 0.95, 1.0), point(1.0, 0.95, 1.0), point(1.01, 0.5, 0.8)]
    search = GoodputSearch(replace(settings, chunks=(256, 512), ranks=4))
    points = [replace(one, layout=search.settings.base(0)) for one in points]
    enough_s = settings.max_point_s + settings.warm_s + 5.0
    assert isinstance(search.next(points, enough_s + 1.0), RunAction)
    assert isinstance(search.next(points, enough_s - 1.0), StopAction)


def test_a_stop_names_what_is_left():
    action = GoodputSearch(settings_of(MD4)).next([], remaining_s=1.0)
    assert isinstance(action, StopAction)
    assert "1 s are left" in action.reason
