"""A plan that nobody follows, of `pdserve plan` or with fixed sizes, tells what the present load asks for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from pdserve.cluster.scaling.limits import limits_of
from pdserve.cluster.scaling.planning import Planning
from pdserve.cluster.scaling.wanted import Mode, WantedSizes
from pdserve.config import ClusterConfig, load
from pdserve.core.slo import ClassDemand
from pdserve.core.worker import Role
from pdserve.planner.limits import Limits, PoolLimits, PoolSizes, Targets
from pdserve.planner.observations import DemandObserved, Observations, PoolObserved
from pdserve.planner.observe import since_start
from pdserve.planner.planner import PlannerState, plan, planned_once
from tests.planner.test_observe import READINGS, numbers, reading, worker
from tests.planner.test_planner import at, check_limits, limits, observed, targets

AIMS, WITHIN = Targets(1.0, 0.05), Limits(PoolLimits(1, 50), PoolLimits(1, 50))
IDLE = Observations(
    1_000.0, 5.0, DemandObserved(0.0, 0.0, 0.0, 0.0, 0.0),
    PoolObserved(2, utilisation=0.0, queued_tokens=0.0), PoolObserved(2, utilisation=0.0, sequences=0.0, kv_used=0.0),
)  # fmt: skip
HOT = Observations(
    1_000.0, 5.0, DemandObserved(100.0, 1e5, 2e4, 500.0, 5e5, 9.0, 0.0),
    PoolObserved(2, busy_tokens_per_s=1e4, utilisation=1.0, queued_tokens=5e4),
    PoolObserved(2, utilisation=1.0, step_s=0.04, sequences=64.0, max_sequences=64.0, kv_used=1.0, queued_tokens=0.0),
)  # fmt: skip


def test_a_dry_run_does_not_answer_the_present_sizes_for_its_cool_down():
    """Two workers of each pool serve a fifth of what comes, or have nothing to do."""
    hot, idle = (planned_once(seen, seen, AIMS, WITHIN) for seen in (HOT, IDLE))
    assert min(hot.prefill, hot.decode) >= 10
    assert f"The prefill pool grows from 2 to {hot.prefill} workers." in hot.reasons
    assert (idle.prefill, idle.decode) == (1, 1)
    assert "The decode pool shrinks from 2 to 1 worker." in idle.reasons


def test_a_plan_that_is_followed_still_waits_for_the_cool_down():
    made = plan(HOT, AIMS, WITHIN, PlannerState())
    assert (made.prefill, made.decode) == (2, 2)


def test_a_dry_run_in_a_quiet_moment_takes_the_rate_since_the_workers_start():
    """No prompt was computed in the window, and one in sixty seconds before: enough to tell the rate of a worker."""
    waits = replace(IDLE, demand=DemandObserved(30.0, 3e4, 0.0, 20.0, 2e4))
    unknown = planned_once(waits, waits, AIMS, WITHIN)
    assert "The rate of a prefill worker is not known yet" in unknown.reasons[0]
    workers = [worker(name, computed_prompt_tokens=10_000, prompt_busy_s=1.0, uptime_s=60.0) for name in ("p0", "p1")]
    whole = since_start(reading(1_000.0, *workers, uptime_s=60.0, requests=9))
    assert (whole.interval_s, whole.prefill.busy_tokens_per_s, whole.demand.requests_per_s) == (60.0, 1e4, 0.15)
    known = planned_once(waits, whole, AIMS, WITHIN)
    assert known.prefill >= 4
    assert known.pools[0].demand_tokens_per_s == unknown.pools[0].demand_tokens_per_s


@settings(max_examples=50, deadline=None)
@given(observed, observed, targets, limits())
def test_a_plan_that_nobody_follows_keeps_every_limit(window, whole, wanted, within):
    window = at(window, 0)
    check_limits(planned_once(window, whole, wanted, within), window, within)


@given(READINGS)
def test_whatever_is_told_since_the_start_nothing_negative_or_endless_comes_out(after):
    for name, value in numbers(since_start(after)):
        assert value is None or name == "now_s" or 0.0 <= value < math.inf, name


@pytest.mark.parametrize("mode", Mode)
def test_with_fixed_sizes_the_plan_tells_what_the_planner_would_do(mode, tmp_path: Path):
    """Two pools of three workers do nothing. Where they are followed, sizes still wait for the delay."""
    config = load(ClusterConfig, None, ("prefill.max_replicas=9", "decode.max_replicas=9", "prefill.replicas=3"))
    planning, wanted = (
        Planning(config, tmp_path, lambda _: None),
        WantedSizes(PoolSizes(3, 3), limits_of(config), automatic=mode is Mode.AUTOMATIC, unlimited=""),
    )
    for now_s in (0.0, 10.0, 20.0):
        pools = [worker(f"{role.value}-{place}", role, uptime_s=now_s) for role in Role for place in range(3)]
        made = planning.decide(reading(now_s, *pools, uptime_s=now_s), (), limits_of(config), wanted, now_s)
    assert made == (PoolSizes(1, 1) if mode is Mode.FIXED else PoolSizes(3, 3))


def test_the_planner_of_a_cluster_reads_its_own_class(tmp_path: Path):
    config = load(ClusterConfig, None, ("autoscaling.slo_class=chat",))
    planning, wanted = (
        Planning(config, tmp_path, lambda _: None),
        WantedSizes(PoolSizes(1, 1), limits_of(config), automatic=False, unlimited=""),
    )
    for now_s, misses in ((0.0, 0), (10.0, 50)):
        classes = (ClassDemand("chat", ttft_met=misses), ClassDemand("voice", ttft_missed=misses))
        one = reading(now_s, worker("p0", uptime_s=now_s), uptime_s=now_s, ttft_missed=misses, classes=classes)
        planning.decide(one, (), limits_of(config), wanted, now_s)
    assert planning._state.corrections.missed_share == 0.0
    assert planning._state.corrections.rate.value == pytest.approx(5.0)
