"""The limits of a plan: who gives way, and what may be started beside workers that drain."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve.planner.budget import startable, within_limits
from pdserve.planner.limits import Limits, PoolLimits, PoolSizes, Targets
from pdserve.planner.observations import PoolObserved
from pdserve.planner.planner import PlannerSettings

sizes = st.builds(PoolSizes, st.integers(0, 30), st.integers(0, 30))


def served(size: int, need: int) -> float:
    return min(1.0, size / need) if need else 1.0


@settings(max_examples=200, deadline=None)
@given(sizes, st.integers(2, 30), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_no_other_sizes_within_the_budget_serve_a_larger_share(wanted, budget, one, other):
    """A request needs both pools, so the smaller share of both is what is served."""
    limits = Limits(PoolLimits(0, 30, gpus=one), PoolLimits(0, 30, gpus=other), max_gpus=budget)
    got, _, _ = within_limits(wanted, limits)
    best = max(
        min(served(prefill, wanted.prefill), served(decode, wanted.decode))
        for prefill in range(wanted.prefill + 1)
        for decode in range(wanted.decode + 1)
        if prefill * one + decode * other <= budget
    )
    assert got.prefill * one + got.decode * other <= budget
    assert min(served(got.prefill, wanted.prefill), served(got.decode, wanted.decode)) == pytest.approx(best)


def test_the_pool_with_the_smaller_loss_gives_way_and_the_limits_are_named():
    limits = Limits(PoolLimits(1, 9), PoolLimits(1, 20), max_workers=12)
    assert within_limits(PoolSizes(4, 20), limits) == (PoolSizes(2, 10), ("max_workers",), ("max_workers",))
    assert within_limits(PoolSizes(12, 0), limits) == (PoolSizes(9, 1), ("prefill.max_workers",), ("decode.min_workers",))


def test_a_start_waits_for_the_room_of_a_worker_that_drains():
    limits = Limits(PoolLimits(1, 9), PoolLimits(1, 9), max_workers=6)
    goal = PoolSizes(4, 2)
    assert startable(goal, goal, PoolObserved(ready=2), PoolObserved(ready=2, leaving=2), limits) == PoolSizes(2, 2)
    assert startable(goal, goal, PoolObserved(ready=2), PoolObserved(ready=2, leaving=1), limits) == PoolSizes(3, 2)


def test_workers_that_the_pools_exchange_need_no_room_but_the_difference_in_cost():
    goal = PoolSizes(4, 2)
    same = Limits(PoolLimits(1, 9, gpus=1), PoolLimits(1, 9, gpus=1), max_gpus=6, can_flip=True)
    assert startable(goal, goal, PoolObserved(ready=2), PoolObserved(ready=4), same) == goal
    still = Limits(PoolLimits(1, 9, gpus=1), PoolLimits(1, 9, gpus=1), max_gpus=6)
    assert startable(goal, goal, PoolObserved(ready=2), PoolObserved(ready=4), still) == PoolSizes(2, 2)


def test_a_gang_takes_the_cpus_of_all_its_ranks_from_what_both_pools_may_have():
    """A gang of four counted as one worker, so eight gangs were planned for the CPUs of two."""
    limits = Limits(PoolLimits(1, 9, cpus=4.0), PoolLimits(1, 9, cpus=1.0), max_cpus=12.0)
    sizes, prefill, decode = within_limits(PoolSizes(8, 4), limits)
    assert (sizes, prefill, decode) == (PoolSizes(2, 4), ("max_cpus",), ())
    goal = PoolSizes(2, 2)  # the second gang waits until four workers of one CPU have left
    assert startable(goal, goal, PoolObserved(ready=1), PoolObserved(ready=2, leaving=3), limits) == PoolSizes(1, 2)
    assert startable(goal, goal, PoolObserved(ready=1), PoolObserved(ready=2, leaving=2), limits) == goal


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: PoolLimits(3, 2), ("min_workers is 3", "max_workers is 2")),
        (lambda: PoolLimits(0, 10_001), ("max_workers", "10000")),
        (lambda: PoolLimits(gpus=math.nan), ("gpus",)),
        (lambda: PoolLimits(price_per_hour=-1), ("price_per_hour",)),
        (lambda: Limits(max_workers=1), ("max_workers 1", "prefill.min_workers 1", "decode.min_workers 1")),
        (lambda: Limits(PoolLimits(2, 2, gpus=8), max_gpus=15), ("max_gpus 15", "prefill.min_workers 2")),
        (lambda: Limits(PoolLimits(price_per_hour=2.0), max_price_per_hour=1.5), ("max_price_per_hour 1.5",)),
        (lambda: Limits(max_gpus=math.inf), ("max_gpus",)),
        (lambda: Targets(ttft_s=0.0), ("ttft_s",)),
        (lambda: Targets(tpot_s=math.nan), ("tpot_s",)),
        (lambda: Targets(attainment=1.0), ("attainment",)),
        (lambda: PlannerSettings(horizon_s=0.0), ("horizon_s",)),
        (lambda: PlannerSettings(kv_share=1.5), ("kv_share",)),
        (lambda: PlannerSettings(max_correction=0.5), ("max_correction",)),
        (lambda: PlannerSettings(start_s="60"), ("start_s", "'60'")),
        (lambda: PlannerSettings(season_buckets=2.5), ("season_buckets",)),
        (lambda: PlannerSettings(flip_delay_s=400.0), ("flip_delay_s", "downscale_delay_s")),
    ],
)
def test_a_wrong_setting_is_named(make, named):
    with pytest.raises(ConfigError) as raised:
        make()
    assert all(name in str(raised.value) for name in named), str(raised.value)


def test_three_times_a_tenth_is_no_more_than_three_tenths():
    limits = Limits(PoolLimits(0, 9, price_per_hour=0.1), PoolLimits(0, 9), max_price_per_hour=0.3)
    assert within_limits(PoolSizes(3, 0), limits)[0] == PoolSizes(3, 0)
