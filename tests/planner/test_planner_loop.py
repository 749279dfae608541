"""The planner around a fluid model of both pools: it settles, stays, and looks ahead. For each check, some planner fails it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from pdserve.planner import planner
from pdserve.planner.correction import PoolSeen
from pdserve.planner.demand import NO_SEASON, PhaseDemand, Traffic
from pdserve.planner.hysteresis import PoolMemory, workers_for
from pdserve.planner.limits import Limits, PoolLimits
from pdserve.planner.need import Need
from pdserve.planner.observations import Observations
from pdserve.planner.planner import Plan, PlannerSettings
from tests.planner.fluid import LIMITS, Fluid, FluidPool, changes

DAY_S = 7_200.0
"""A short day, so that three of them are simulated in a second."""


def step(at_s: float, before: float, after: float) -> Callable[[float], float]:
    return lambda now_s: before if now_s < at_s else after


def stays_under_constant_load() -> None:
    """Sizes change at most once in 1,000 intervals of noise, also where the need is just at a whole number of workers."""
    for seed, rate in enumerate([8.0, 35.0, 53.0]):
        fluid = Fluid(lambda _, rate=rate: rate, seed=seed, interval_s=2.0)
        fluid.run(400)
        assert changes(fluid.run(1_000)) <= 1, rate


def test_settles_after_a_step_up_and_a_step_down():
    """The pools serve the new load within ten minutes, and keep few workers too many for longer than half an hour."""
    fluid = Fluid(step(600, 10, 60), interval_s=2.0)
    fluid.run(300)
    before = fluid.plans[-1]
    fluid.run(300)
    assert fluid.prompts < 100_000
    assert fluid.waiting < 1
    fluid.run(900)
    high = fluid.plans[-1]
    assert 7 <= high.prefill <= 10
    assert 5 <= high.decode <= 7
    assert changes(fluid.plans) < 30
    fluid.load = step(0, 0, 10)
    fluid.run(1_200)
    low = fluid.plans[-1]
    assert low.prefill <= before.prefill + 1
    assert low.decode <= before.decode + 1


def flips_are_preferred() -> None:
    """Decode lacks workers that prefill has to spare: it gets them although nobody may shrink for an hour."""
    limits = replace(LIMITS, max_workers=14, can_flip=True)
    fluid = Fluid(step(450, 20, 40), limits=limits, prefill=FluidPool(7), decode=FluidPool(2), noise=False)
    fluid.settings = PlannerSettings(downscale_delay_s=3_600.0)
    made = fluid.run(900)
    assert any("A worker changes its role from prefill to decode." in each.reasons for each in made)
    assert fluid.prefill.all + fluid.decode.all == 9


def keeps_the_budget() -> None:
    """Twelve GPUs are never exceeded, not even while workers drain, under four times the load that they serve."""
    limits = Limits(PoolLimits(1, 40, gpus=2), PoolLimits(1, 40, gpus=1), max_gpus=12)
    fluid = Fluid(lambda now_s: 120.0 + 100 * math.sin(now_s / 200), limits=limits, drain_s=100.0)
    for made in (fluid.run(1)[0] for _ in range(2_000)):
        assert 2 * fluid.prefill.all + fluid.decode.all <= 12
        assert 2 * made.prefill + made.decode <= 12
    assert any("max_gpus" in made.pools[0].limits for made in fluid.plans)
    assert any("autoscaling.max_gpus is 12" in text for made in fluid.plans for text in made.reasons)


def unknown_values_are_no_zeros() -> None:
    """The counts of the router are NaN for twenty minutes: the sizes stay, and the reason says so."""
    fluid = Fluid(step(0, 0, 40))
    fluid.run(900)
    before = fluid.plans[-1]
    honest = fluid.planner

    def blind(observed: Observations, *rest: Any) -> Plan:
        unknown = {field.name: math.nan for field in fields(observed.demand)}
        return honest(replace(observed, demand=type(observed.demand)(**unknown)), *rest)

    fluid.planner = blind
    for made in fluid.run(1_200):
        assert (made.pools[0].wanted, made.pools[1].wanted) == (before.pools[0].wanted, before.pools[1].wanted)
        assert "demand.requests_per_s is nan" in made.reasons[0]


def corrections_do_not_wind_up() -> None:
    """Workers take ten minutes to start. Their absence is no error of the rates, and teaches nothing: only misses before they
    are ordered count, for one more worker."""
    fluid = Fluid(step(300, 5, 60), start_s=600.0, noise=False, tells_misses=True)
    for made in fluid.run(900):
        assert made.pools[0].correction < 2.2
        assert made.pools[1].correction < 2.2


def the_season_starts_workers_before_the_rise() -> None:
    """The load jumps at the same time of each day. On the fourth day the workers are ready when it does."""

    def load(now_s: float) -> float:
        return 50.0 if 0.5 <= now_s % DAY_S / DAY_S < 0.8 else 5.0

    settings = PlannerSettings(season_s=DAY_S, season_buckets=48, start_s=120.0)
    fluid = Fluid(load, settings=settings, interval_s=12.0, start_s=100.0)
    per_day = int(DAY_S / fluid.interval_s)
    fluid.run(3 * per_day)
    fluid.run(int(per_day * 0.5) - 1)
    ready = fluid.prefill.ready
    assert ready >= 5
    assert any("last season" in text for made in fluid.plans[-20:] for text in made.reasons)
    first_day = fluid.plans[int(per_day * 0.5) - 2]
    assert first_day.prefill <= 3
    fluid.run(int(per_day * 0.49))
    assert fluid.plans[-1].prefill <= 3, "a season is a floor for growth and keeps nobody after the peak"


def at_once(memory: PoolMemory, need: float, now_s: float, settings: PlannerSettings, room: float = 0.0) -> PoolMemory:
    return replace(memory, wanted=workers_for(need), changed_s=now_s)


def without_unknowns(observed: Observations) -> tuple[str, ...]:
    """Take a value that is no number for zero, as a careless planner does."""
    for name in (field.name for field in fields(observed.demand)):
        if not math.isfinite(getattr(observed.demand, name) or 0.0):
            object.__setattr__(observed.demand, name, 0.0)
    return ()


def always(observed: Observations, needs: tuple[Need, Need], *_: Any) -> tuple[PoolSeen, PoolSeen]:
    """Let misses count while workers are on the way."""
    seen = ((observed.prefill, needs[0]), (observed.decode, needs[1]))
    prefill, decode = (PoolSeen(pool.ready, need.workers or 0.0, math.inf, False) for pool, need in seen)
    return prefill, decode


CHECKS: dict[Callable[[], None], tuple[str, Any]] = {
    stays_under_constant_load: ("decided", at_once),
    flips_are_preferred: ("given", lambda memory, *_: memory),
    keeps_the_budget: ("within_limits", lambda wanted, _: (wanted, (), ())),
    unknown_values_are_no_zeros: ("faults", without_unknowns),
    corrections_do_not_wind_up: ("_pools_of", always),
    the_season_starts_workers_before_the_rise: ("prompt_demand", None),
}


@pytest.mark.quick("flips*", "keeps*", "unknown*", "corrections*", "the_season*")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_planner(check: Callable[[], None]) -> None:
    check()


@pytest.mark.quick("flips_are_preferred", "keeps_the_budget", "unknown_values_are_no_zeros", "corrections_do_not_wind_up")
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_planner_without_a_part_is_caught(check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    name, mutant = CHECKS[check]
    if mutant is None:  # a planner without seasons
        whole = planner.prompt_demand

        def mutant(traffic: Traffic, *rest: Any) -> PhaseDemand:
            prompt, requests = (replace(each, season=NO_SEASON) for each in (traffic.prompt, traffic.requests))
            return whole(replace(traffic, prompt=prompt, requests=requests), *rest)

    monkeypatch.setattr(planner, name, mutant)
    with pytest.raises(AssertionError):
        check()
