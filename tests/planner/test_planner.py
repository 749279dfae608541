"""Properties of whole plans, whatever was observed before."""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.planner.limits import Limits, PoolLimits, PoolSizes, Targets
from pdserve.planner.observations import DemandObserved, Observations, PoolObserved
from pdserve.planner.planner import Plan, PlannerSettings, PlannerState, plan

INTERVAL_S = 10.0
NO_SEASON = PlannerSettings(season_s=0.0)
rates = st.floats(0, 1e6)
shares = st.floats(0, 1)
counts = st.integers(0, 12)
broken = st.sampled_from([math.nan, math.inf, -math.inf, -1.0])


def maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


demands = st.builds(DemandObserved, rates, rates, rates, st.floats(0, 1e4), rates, maybe(rates), maybe(rates), maybe(shares))
pools = st.builds(
    PoolObserved,
    ready=counts,
    coming=counts,
    leaving=counts,
    busy_tokens_per_s=maybe(st.floats(1, 1e6)),
    utilisation=shares,
    step_s=maybe(st.floats(1e-3, 10)),
    sequences=st.floats(0, 500),
    max_sequences=maybe(st.floats(1, 500)),
    kv_used=shares,
    queued_tokens=rates,
    cached_share=maybe(shares),
    prompt_share=maybe(shares),
)
observed = st.builds(Observations, st.just(0.0), st.just(INTERVAL_S), demands, pools, pools, maybe(shares), maybe(shares))
targets = st.builds(Targets, maybe(st.floats(0.01, 10)), maybe(st.floats(0.001, 1)), st.floats(0.5, 0.999))


@st.composite
def limits(draw: st.DrawFn) -> Limits:
    """Limits whose minima fit the budget."""
    each = [
        PoolLimits(
            draw(st.integers(0, 3)),
            draw(st.integers(3, 20)),
            draw(st.sampled_from([0, 1, 4])),
            draw(st.sampled_from([0, 1, 2])),
            draw(st.floats(0, 5)),
        )
        for _ in range(2)
    ]
    least = [
        sum(pool.min_workers for pool in each),
        sum(pool.min_workers * pool.cpus for pool in each),
        sum(pool.min_workers * pool.gpus for pool in each),
        sum(pool.min_workers * pool.price_per_hour for pool in each),
    ]
    budget = [draw(maybe(st.integers(0, 20).map(lambda more, at=at: least[at] + more))) for at in range(4)]
    return Limits(each[0], each[1], *budget, can_flip=draw(st.booleans()))


def at(each: Observations, number: int) -> Observations:
    return replace(each, now_s=(number + 1) * INTERVAL_S)


def costs(limits: Limits) -> dict[str, tuple[float, float, float]]:
    """The limits that are set, with what a worker of each pool uses of them."""
    found = {
        "max_workers": (limits.max_workers, 1, 1),
        "max_cpus": (limits.max_cpus, limits.prefill.cpus, limits.decode.cpus),
        "max_gpus": (limits.max_gpus, limits.prefill.gpus, limits.decode.gpus),
        "max_price_per_hour": (limits.max_price_per_hour, limits.prefill.price_per_hour, limits.decode.price_per_hour),
    }
    return {name: cost for name, cost in found.items() if cost[0] is not None}


def check_limits(made: Plan, seen: Observations, limits: Limits) -> None:
    """Assert that the sizes are within all limits, and that starts are, beside all workers that exist."""
    for size, each, need in zip((made.prefill, made.decode), (limits.prefill, limits.decode), made.pools, strict=True):
        assert size <= each.max_workers
        assert size >= each.min_workers or "leaving" in need.limits
    prefill, decode = seen.prefill, seen.decode
    more = made.prefill - prefill.ready - prefill.coming, made.decode - decode.ready - decode.coming
    flips = max(0, min(more[0], -more[1]), min(more[1], -more[0])) if limits.can_flip else 0
    starts = max(more[0], 0) - flips * (more[0] > 0), max(more[1], 0) - flips * (more[1] > 0)
    for name, (limit, one, other) in costs(limits).items():
        room = limit * (1 + 1e-9)
        assert made.prefill * one + made.decode * other <= room, name
        if sum(starts):
            there = (prefill.ready + prefill.coming + prefill.leaving) * one
            there += (decode.ready + decode.coming + decode.leaving) * other
            dearer = max(0.0, one - other if more[0] > 0 else other - one) * flips
            assert there + dearer + starts[0] * one + starts[1] * other <= room * (1 + 1e-9), name


def numbers(value: Any) -> list[float]:
    """Every number in a state."""
    if is_dataclass(value):
        return [each for field in fields(value) for each in numbers(getattr(value, field.name))]
    if isinstance(value, tuple):
        return [each for item in value for each in numbers(item)]
    return [value] if isinstance(value, int | float) else []


@settings(max_examples=100, deadline=None)
@given(st.lists(observed, min_size=1, max_size=8), targets, limits())
def test_sizes_are_within_every_limit_and_the_state_stays_finite(all_seen, wanted, within):
    state = PlannerState()
    for seen in [at(each, number) for number, each in enumerate(all_seen)]:
        made = plan(seen, wanted, within, state)
        state = made.state
        check_limits(made, seen, within)
        assert all(math.isfinite(each) for each in numbers(state))
        assert len(numbers(state)) < 2_000
        assert all(text.endswith(".") for text in made.reasons)
        assert (made.pools[0].size, made.pools[1].size) == (made.prefill, made.decode)


OPTIONAL = ("longest_wait_s", "refused_per_s", "prefill_share")
REQUIRED = [
    *(("demand", field.name) for field in fields(DemandObserved) if field.name not in OPTIONAL),
    ("prefill", "queued_tokens"), ("decode", "sequences"), ("decode", "kv_used"),
]  # fmt: skip
COUNTS = ("ready", "coming", "leaving")
NUMBERS = [
    *(("demand", field.name) for field in fields(DemandObserved)),
    *((pool, field.name) for pool in ("prefill", "decode") for field in fields(PoolObserved) if field.name not in COUNTS),
]


def spoiled(seen: Observations, part: str, name: str, value: float | None) -> Observations:
    return replace(seen, **{part: replace(getattr(seen, part), **{name: value})})


@pytest.mark.parametrize(("part", "name"), sorted({*REQUIRED, *NUMBERS}))
@settings(max_examples=15, deadline=None)
@given(st.lists(observed, min_size=1, max_size=4), targets, broken | st.none())
def test_a_value_that_is_missing_or_broken_holds_the_wanted_sizes(part, name, all_seen, wanted, value):
    if value is None and (part, name) not in REQUIRED:
        return
    state, within = PlannerState(), Limits(PoolLimits(1, 50), PoolLimits(1, 50))
    for number, seen in enumerate(all_seen):
        made = plan(at(seen, number), wanted, within, state)
        state = made.state
    busy = spoiled(spoiled(at(all_seen[-1], len(all_seen)), "prefill", "ready", 1), "decode", "ready", 1)
    after = plan(spoiled(busy, part, name, value), wanted, within, state)
    assert [need.wanted for need in after.pools] == [need.wanted for need in made.pools]
    assert f"{part}.{name}" in " ".join(after.reasons)
    assert (after.state.traffic, after.state.workers, after.state.now_s) == (state.traffic, state.workers, state.now_s)


def test_unknown_intervals_now_and_then_do_not_keep_a_pool_large():
    """Every second reading lacks the counts of requests. A pool without work still shrinks after its delay."""
    within, state = Limits(PoolLimits(1, 9), PoolLimits(1, 9)), PlannerState()
    for number in range(80):
        seen = at(idle(PoolSizes(5, 5)), number)
        made = plan(spoiled(seen, "demand", "requests_per_s", None if number % 2 else 0.0), Targets(), within, state)
        state = made.state
    assert (made.prefill, made.decode) == (1, 1)


@settings(max_examples=25, deadline=None)
@given(st.lists(observed, min_size=1, max_size=8), targets, limits())
def test_zero_traffic_ends_at_the_minima(all_seen, wanted, within):
    state = PlannerState()
    for number, seen in enumerate(all_seen):
        state = plan(at(seen, number), wanted, within, state, NO_SEASON).state
    for number in range(len(all_seen), len(all_seen) + 300):
        made = plan(at(idle(state.sizes), number), wanted, within, state, NO_SEASON)
        state = made.state
    assert (made.prefill, made.decode) == (within.prefill.min_workers, within.decode.min_workers)


def idle(sizes: PoolSizes | None) -> Observations:
    assert sizes is not None
    empty = {"utilisation": 0.0, "sequences": 0.0, "kv_used": 0.0, "queued_tokens": 0.0}
    return Observations(
        0.0,
        INTERVAL_S,
        DemandObserved(0.0, 0.0, 0.0, 0.0, 0.0),
        PoolObserved(sizes.prefill, **empty),
        PoolObserved(sizes.decode, **empty),
    )


@settings(max_examples=100, deadline=None)
@given(observed, targets, st.integers(4, 40), st.floats(1, 20), st.floats(0, 1e3), st.booleans())
def test_more_demand_never_means_fewer_workers(seen, wanted, intervals, factor, queued, can_flip):
    """Both phases and the queue grow by a factor, with the same requests as before; all else is equal."""
    within = Limits(PoolLimits(1, 9_000), PoolLimits(1, 9_000), can_flip=can_flip)
    state = PlannerState()
    for number in range(intervals):
        state = plan(at(seen, number), wanted, within, state).state
    demand = seen.demand
    more = {field.name: getattr(demand, field.name) for field in fields(demand)}
    longer = queued if demand.queued_requests else 0.0  # a queue where none was may change which pool is to blame
    more = {name: value and value * factor + longer * name.startswith("queued") for name, value in more.items()}
    few = plan(at(seen, intervals), wanted, within, state)
    many = plan(at(replace(seen, demand=DemandObserved(**more)), intervals), wanted, within, state)
    for one, other in zip(few.pools, many.pools, strict=True):
        assert (other.raw_workers or 0) >= (one.raw_workers or 0) * (1 - 1e-9)
        assert other.wanted >= one.wanted or can_flip
    assert many.prefill + many.decode >= few.prefill + few.decode


def test_a_pool_that_nobody_measured_keeps_its_size():
    """Requests come, and no prompt has been computed yet: the rate of a worker is unknown."""
    seen = replace(idle(PoolSizes(3, 3)), demand=DemandObserved(5.0, 5e3, 0.0, 0.0, 0.0))
    state = PlannerState()
    for number in range(100):
        made = plan(at(seen, number), Targets(ttft_s=1.0), Limits(PoolLimits(1, 9), PoolLimits(1, 9)), state)
        state = made.state
    assert (made.prefill, made.decode) == (3, 1)
    assert "The rate of a prefill worker is not known yet" in made.reasons[0]


def test_an_empty_pool_gets_its_first_worker_when_requests_come():
    within = Limits(PoolLimits(0, 9), PoolLimits(0, 9))
    nothing = idle(PoolSizes(0, 0))
    state = plan(at(nothing, 0), Targets(), within, PlannerState()).state
    made = plan(at(replace(nothing, demand=DemandObserved(1.0, 1e3, 0.0, 4.0, 4e3)), 1), Targets(), within, state)
    assert made.prefill == 1


def test_a_clock_that_goes_back_and_a_gap_hold_the_sizes():
    """A planner that slept for an hour does not take the hour for one of little need."""
    within = Limits(PoolLimits(1, 9), PoolLimits(1, 9))
    first = plan(at(idle(PoolSizes(5, 5)), 0), Targets(), within, PlannerState())
    back = plan(at(idle(PoolSizes(5, 5)), -1), Targets(), within, first.state)
    assert (back.prefill, back.decode, back.state) == (5, 5, first.state)
    assert "now_s went from 10 to 0" in back.reasons[0]
    later = plan(at(idle(PoolSizes(5, 5)), 360), Targets(), within, first.state)
    assert (later.prefill, later.decode) == (5, 5)
    done = later
    for number in range(361, 400):
        done = plan(at(idle(PoolSizes(5, 5)), number), Targets(), within, done.state)
    assert (done.prefill, done.decode) == (1, 1)
