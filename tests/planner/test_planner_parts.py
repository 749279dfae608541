"""The parts of the planner one by one: waits, steps, trends, seasons, corrections and hysteresis."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pdserve.planner.demand import NO_SERIES, NO_TRAFFIC, output_demand, prompt_demand
from pdserve.planner.hysteresis import PoolMemory, begun, decided, held
from pdserve.planner.hysteresis import given as gives
from pdserve.planner.limits import Targets
from pdserve.planner.means import NO_MEAN, NO_RATE, NO_TREND
from pdserve.planner.need import NO_WORKERS, decode_need, late, prefill_need, wait_within, workers_for_wait
from pdserve.planner.observations import DemandObserved, Observations, PoolObserved
from pdserve.planner.planner import PlannerSettings
from pdserve.planner.steps import NO_STEPS, StepLine, room

SETTINGS = PlannerSettings()
loads = st.floats(0.01, 200)
services = st.floats(0.001, 2)


def simulated_late(workers: int, load: float, service_s: float, wait_s: float, seed: int = 0) -> float:
    """The share of late prompts in a simulated queue with exponential times and one waiting line."""
    chance = random.Random(seed)
    free, now, misses, count = [0.0] * workers, 0.0, 0, 20_000
    for _ in range(count):
        now += chance.expovariate(load / service_s)
        at = min(range(workers), key=free.__getitem__)
        start = max(now, free[at])
        misses += start - now > wait_s
        free[at] = start + chance.expovariate(1 / service_s)
    return misses / count


@pytest.mark.parametrize(("workers", "load"), [(1, 0.6), (2, 1.5), (4, 3.2), (10, 9.0)])
def test_the_formula_of_waits_is_near_a_simulated_queue(workers, load):
    """With exponential times the formula is nearly exact."""
    for wait_s in (0.1, 0.3):
        assert late(workers, load, 0.1, wait_s, 1.0) == pytest.approx(simulated_late(workers, load, 0.1, wait_s), abs=0.05)


@settings(max_examples=200, deadline=None)
@given(loads, services, st.floats(0.01, 5), st.floats(0.001, 0.5), st.floats(1, 3))
def test_workers_for_a_wait_suffice_are_few_and_grow_with_the_load(load, service_s, ttft_s, miss, factor):
    wait_s = wait_within(ttft_s, service_s)
    count = workers_for_wait(load, service_s, wait_s, miss, 1.0, 0.9)
    assert count >= load / 0.9 * (1 - 1e-9)
    assert late(count, load, service_s, wait_s, 1.0) <= miss * (1 + 1e-6)
    if count > load / 0.9 * (1 + 1e-6):
        assert late(count * 0.99, load, service_s, wait_s, 1.0) > miss * 0.9
    assert workers_for_wait(load * factor, service_s, wait_s, miss, 1.0, 0.9) >= count * (1 - 1e-6)
    assert workers_for_wait(load, service_s * factor, wait_within(ttft_s, service_s * factor), miss, 1.0, 0.9) >= count * (
        1 - 1e-6
    )


def test_a_prompt_without_tokens_waits_for_nobody():
    assert workers_for_wait(1e-300, 0.0, 1.0, 0.01, 1.0, 0.9) == pytest.approx(0.0)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.005, 0.1), st.floats(1e-5, 1e-3), st.lists(st.floats(1, 200), min_size=2, max_size=30))
def test_the_line_of_steps_is_found(fixed_s, sequence_s, counts):
    assume(max(counts) > 2 * min(counts))
    steps = NO_STEPS
    for number, count in enumerate(counts):
        steps = steps.add(count, fixed_s + sequence_s * count, float(number), 1.0, SETTINGS)
    line = steps.line()
    for count in (10.0, 100.0):
        assert line.step_s(count) == pytest.approx(fixed_s + sequence_s * count, rel=0.01)


def test_one_disturbed_point_moves_the_line_little():
    steps = NO_STEPS
    for number, count in enumerate([1, 3, 6, 12, 25, 50, 100]):
        steps = steps.add(count, (0.02 + 0.0002 * count) * (5 if count == 12 else 1), float(number), 1.0, SETTINGS)
    assert steps.points[3].at[1] > 0.1
    slope = steps.line().sequence_s / steps.line().fixed_s
    assert slope == pytest.approx(0.01, rel=0.1)


def test_steps_that_differ_by_noise_alone_are_explained_by_the_last_one():
    """A step with 10 sequences takes 20 ms: the fixed part is as long as 64 sequences."""
    steps = NO_STEPS
    for number in range(100):
        steps = steps.add(10 + number % 2 * 0.1, 0.02, float(number), 1.0, SETTINGS)
    line = steps.line()
    assert line.fixed_s / line.sequence_s == pytest.approx(64.0)
    assert line.step_s(10.05) == pytest.approx(0.02, rel=1e-3)


def test_points_are_forgotten_and_bounded():
    steps = NO_STEPS
    for number in range(60):
        steps = steps.add(2.0**number, 0.02, float(number), 1.0, SETTINGS)
    assert 15 < len(steps.points) <= 40
    assert len(steps.add(1.0, 0.02, 1e5, 1.0, SETTINGS).points) == 1
    assert steps.add(0.0, 0.02, 1.0, 1.0, SETTINGS) is steps
    assert steps.add(5e-324, 0.02, 1.0, 1.0, SETTINGS) is steps, "a mean of nearly nothing has no finite quotients"


def test_what_bounds_the_sequences_of_a_worker():
    line = StepLine(0.02, 0.0002)
    assert room(line, 1e6, 0.05, None, None, SETTINGS).sequences == pytest.approx((SETTINGS.tpot_share * 0.05 - 0.02) / 0.0002)
    assert room(line, 1e6, 0.05, 64, None, SETTINGS).bound == "64 sequences"
    assert room(line, 1e6, 0.05, 256, 0.02, SETTINGS).sequences == pytest.approx(42.5)
    assert room(line, 16, 0.05, 256, None, SETTINGS).sequences == 16
    unreachable = room(line, 1e6, 0.01, 256, None, SETTINGS)
    assert unreachable.sequences == pytest.approx(5)
    assert "cannot reach" in unreachable.bound


def test_a_mean_begins_with_its_first_value():
    assert NO_MEAN.value is None
    assert NO_MEAN.add(5.0, 1.0, 300.0).value == pytest.approx(5.0)
    mean = NO_MEAN
    for _ in range(1_000):
        mean = mean.add(7.0, 1.0, 30.0)
    assert mean.value == pytest.approx(7.0)


def test_a_trend_follows_a_ramp_without_lag():
    trend = NO_TREND
    for number in range(3_000):
        trend = trend.add(10 + 0.5 * number, 1.0, 30.0, 300.0)
    assert trend.level == pytest.approx(10 + 0.5 * 2_999, rel=0.01)
    assert trend.slope_per_s == pytest.approx(0.5, rel=0.01)
    assert trend.ahead(60.0, 300.0) > trend.level + 25
    assert replace(trend, slope_per_s=-1e9).ahead(60.0, 300.0) == 0.0


def learned(load, days: int, plan: PlannerSettings, interval_s: float = 5.0):
    series = NO_SERIES
    for number in range(int(days * plan.season_s / interval_s)):
        now_s = (number + 1) * interval_s
        series = series.add(load(now_s), now_s, interval_s, plan)
    return series


SHORT_DAY = PlannerSettings(season_s=3_600.0, season_buckets=36, start_s=60.0)


def jump(now_s: float) -> float:
    return 100.0 if now_s % 3_600 >= 1_800 else 10.0


def test_a_season_counts_only_after_one_was_seen_and_judged():
    for days in (0.5, 1):
        assert learned(jump, days, SHORT_DAY).season.ahead(days * 3_600, SHORT_DAY) is None
    series = learned(jump, 3, SHORT_DAY)
    assert series.season.ahead(3 * 3_600 + 1_700, SHORT_DAY) == pytest.approx(10.0)
    assert series.season.ahead(3 * 3_600 + 1_780, SHORT_DAY) == pytest.approx(100.0)
    assert len(series.season.foreseen) <= 3


def test_a_season_that_forecasts_worse_than_the_trend_is_not_used():
    """The days have nothing in common."""
    chance = random.Random(1)
    days = [chance.uniform(1, 1_000) for _ in range(8)]
    series = learned(lambda now_s: days[int(now_s // 3_600) % 8], 6, SHORT_DAY)
    assert series.season.ahead(6 * 3_600, SHORT_DAY) is None


def test_a_gap_makes_a_season_incomplete_and_none_is_learned_without_one():
    series = learned(jump, 3, SHORT_DAY)
    late_s = 3 * 3_600 + 1_000.0
    assert None in series.add(10.0, late_s, 5.0, SHORT_DAY).season.means
    assert learned(jump, 1, replace(SHORT_DAY, season_s=3_600.0)).season.means
    assert NO_SERIES.add(1.0, 1.0, 1.0, replace(SHORT_DAY, season_s=0.0)).season.means == ()


def test_refused_requests_are_demand_for_both_pools():
    """Early rejection refuses four requests of five, so nothing waits, and what is admitted is served."""
    traffic = NO_TRAFFIC
    for number in range(900):
        seen = DemandObserved(2.0, 2e3, 400.0, 0.0, 0.0, refused_per_s=0.0)
        if number >= 300:
            seen = DemandObserved(10.0, 2e3, 400.0, 0.0, 0.0, refused_per_s=8.0)
        traffic = traffic.add(Observations(float(number), 1.0, seen), SETTINGS)
    after = Observations(900.0, 1.0, seen)
    assert prompt_demand(traffic, after, SETTINGS).measured == pytest.approx(1e4, rel=0.2)
    assert output_demand(traffic, after, SETTINGS).measured == pytest.approx(2e3, rel=0.2)


def test_requests_that_wait_are_demand_for_decode_though_no_token_comes():
    traffic = NO_TRAFFIC
    free = DemandObserved(10.0, 1e4, 2e3, 0.0, 0.0)
    for number in range(600):
        traffic = traffic.add(Observations(float(number), 1.0, free), SETTINGS)
    full = Observations(700.0, 1.0, DemandObserved(30.0, 3e4, 2e3, 600.0, 6e5))
    for _ in range(600):
        traffic = traffic.add(full, SETTINGS)
    demand = output_demand(traffic, full, SETTINGS)
    assert demand.request_tokens == pytest.approx(200.0)
    assert demand.measured == pytest.approx(6e3, rel=0.2)
    assert demand.total >= demand.measured + 600 * 200 / SETTINGS.horizon_s - 1


@settings(max_examples=50, deadline=None)
@given(st.floats(0.01, 100), st.floats(0.1, 1), st.floats(0.1, 1), st.floats(0.1, 1), st.integers(1, 20))
def test_a_rate_that_is_learned_wrong_never_means_fewer_workers_than_the_measured_load_needs(lie, busy, kv_used, runs, ready):
    """Workers seem faster or slower than they are, but how busy they are, how much KV they hold and how many of their sequences
    run is measured."""
    workers, traffic = NO_WORKERS, NO_TRAFFIC
    prefill = PoolObserved(ready, busy_tokens_per_s=1e4 * lie, utilisation=busy)
    decode = PoolObserved(ready, step_s=0.02 / lie, sequences=50.0, max_sequences=50.0 / runs, kv_used=kv_used)
    for number in range(200):
        seen = Observations(float(number), 1.0, DemandObserved(5.0, 5e3, 1e3, 0.0, 0.0), prefill, decode)
        workers, traffic = workers.add(seen, SETTINGS), traffic.add(seen, SETTINGS)
    aims = Targets(1.0, 0.05)
    prompts = prefill_need(workers, prompt_demand(traffic, seen, SETTINGS), aims, SETTINGS)
    outputs = decode_need(workers, output_demand(traffic, seen, SETTINGS), aims, SETTINGS)
    assert prompts.workers >= ready * busy / SETTINGS.max_utilisation * (1 - 1e-9)
    assert outputs.workers >= ready * kv_used / SETTINGS.kv_share * (1 - 1e-9)
    assert outputs.workers >= ready * runs / SETTINGS.sequences_share * (1 - 1e-9)


@pytest.mark.parametrize("cached", [0.0, 0.9])
def test_only_prompts_without_cached_kv_are_demand_and_those_that_wait_on_workers_are(cached):
    traffic = NO_TRAFFIC
    free = DemandObserved(10.0, 1e4, 2e3, 0.0, 0.0)
    for number in range(900):
        traffic = traffic.add(Observations(float(number), 1.0, free, PoolObserved(2, cached_share=cached)), SETTINGS)
    waits = Observations(900.0, 1.0, replace(free, queued_prompt_tokens=1e6), PoolObserved(2, queued_tokens=6e5))
    demand = prompt_demand(traffic, waits, SETTINGS)
    assert demand.measured == pytest.approx(1e4 * (1 - cached), rel=0.01)
    assert demand.request_tokens == pytest.approx(1e3 * (1 - cached), rel=0.01)
    assert demand.backlog_tokens == pytest.approx(1e6 * (1 - cached) + 6e5, rel=0.01)
    assert demand.total >= demand.measured + demand.backlog_tokens / SETTINGS.horizon_s - 1


needs = st.lists(st.floats(0, 30), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 20), needs, st.floats(5, 60))
def test_a_pool_never_shrinks_below_the_largest_need_of_the_delay_nor_changes_twice_in_a_cool_down(size, needs, interval_s):
    memory = begun(size, 0.0)
    changed_s, past = 0.0, []
    for number, need in enumerate(needs):
        now_s = (number + 1) * interval_s
        past.append((now_s, math.ceil(need * 1.1 - 0.01) if need * 1.1 > 0.01 else 0))
        after = decided(memory, need, now_s, SETTINGS)
        if after.wanted != memory.wanted:
            assert now_s >= changed_s + SETTINGS.cooldown_s
            changed_s = now_s
        if after.wanted < memory.wanted:
            assert now_s >= SETTINGS.downscale_delay_s
            recent = [workers for at_s, workers in past if at_s >= now_s - SETTINGS.downscale_delay_s]
            assert after.wanted == max(recent)
        memory = after
        assert len(memory.needs) <= 64


def test_a_need_within_the_tolerance_changes_nothing():
    for need in (3.65, 4.0, 4.4):
        memory = begun(4, 0.0)
        for number in range(1, 500):
            memory = decided(memory, need, number * 5.0, SETTINGS)
        assert memory.wanted == 4
    assert decided(begun(4, 0.0), 4.5, 31.0, SETTINGS).wanted == 5
    assert decided(begun(4, 0.0), 4.5, 29.0, SETTINGS).wanted == 4


def test_an_interval_of_which_nothing_is_known_counts_as_need():
    memory = begun(5, 0.0)
    for number in range(1, 100):
        memory = held(memory, number * 10.0, SETTINGS)
    assert decided(memory, 1.0, 1_000.0, SETTINGS).wanted == 5


def test_a_pool_gives_only_what_it_did_not_need_for_the_delay_of_flips():
    memory = begun(5, 0.0)
    for number in range(1, 4):
        memory = decided(memory, 2.5, number * 10.0, SETTINGS)
    assert gives(memory, 9, 30.0, SETTINGS) == memory
    for number in range(4, 10):
        memory = decided(memory, 2.5, number * 10.0, SETTINGS)
    assert gives(memory, 1, 90.0, SETTINGS).wanted == 4
    assert gives(memory, 9, 90.0, SETTINGS).wanted == 3
    assert gives(gives(memory, 1, 90.0, SETTINGS), 1, 100.0, SETTINGS).wanted == 4


def test_a_long_fall_keeps_few_needs():
    memory = PoolMemory(5_000, 0.0)
    for number in range(1, 1_000):
        memory = decided(memory, 5_000 - number, number * 0.1, SETTINGS)
    assert len(memory.needs) <= 64
    assert memory.largest(0.0) >= 4_999


@given(st.floats(0, 1e15), st.floats(0, 1e15), st.floats(0, 1e15))
def test_a_rate_is_finite_for_any_values_and_any_size_of_a_piece(first, then, piece):
    rate = NO_RATE.add(first, 1.0, 30.0).add(then, 1.0, 30.0)
    for size in (0.0, 1e-302, piece):
        assert 0.0 <= rate.value(size, 30.0) <= 1.001 * max(first, then)


def test_a_steady_rate_has_little_noise_and_a_jump_is_seen_within_seconds():
    chance, rate, seen = random.Random(1), NO_RATE, []
    for number in range(4_000):
        arrived = sum(chance.random() < 0.3 / 20 for _ in range(100))  # 0.3 a second, in intervals of 5 s
        rate = rate.add(arrived / 5.0, 5.0, 30.0)
        if number > 200:
            seen.append(rate.value(1.0, 30.0))
    assert statistics.pstdev(seen) < 0.25 * 0.3, "a mean of 30 s alone has 0.43"
    for _ in range(5):
        rate = rate.add(3.0, 5.0, 30.0)
    assert rate.value(1.0, 30.0) > 1.5
