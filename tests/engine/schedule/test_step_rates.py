"""The speed that an engine learns from its steps: exact where steps are, steady where they are disturbed, always a number."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.engine.schedule.step_rates import DISTURBED, StepCost, StepRates

costs = st.builds(StepCost, st.floats(0.001, 0.2), st.floats(1e-5, 1e-2))


def run(rates: StepRates, cost: StepCost, rng: Random, steps: int, *, times: float = 1.0) -> None:
    """Steps of all sizes; each fiftieth takes `times` as long as the cost says."""
    for i in range(steps):
        prompt, decodes = rng.choice((0, rng.randint(1, 512))), rng.randint(1, 16)
        late = times if i % 50 == 24 else 1.0
        rates.add(prompt, decodes, cost.step_s(prompt + decodes) * late)


def learned(rates: StepRates) -> StepCost:
    assert rates.cost is not None
    return rates.cost


@given(cost=costs, seed=st.integers(0, 10**6))
@settings(max_examples=50, deadline=None)
def test_it_learns_exactly_what_steps_cost(cost: StepCost, seed: int):
    rates = StepRates()
    run(rates, cost, Random(seed), 100)
    assert learned(rates) == pytest.approx(cost, rel=1e-6, abs=1e-9)


@given(cost=costs, seed=st.integers(0, 10**6), times=st.floats(2.0, 1e6))
@settings(max_examples=50, deadline=None)
def test_a_few_slow_steps_move_it_little(cost: StepCost, seed: int, times: float):
    rng, rates = Random(seed), StepRates()
    run(rates, cost, rng, 200)
    run(rates, cost, rng, 200, times=times)
    for tokens in (16, 512):
        assert abs(learned(rates).step_s(tokens) - cost.step_s(tokens)) < 0.75 * cost.step_s(256)
    decode = StepRates()
    for i in range(400):
        decode.add(0, 8, 0.03 * (times if i % 50 == 49 else 1))
    assert 0.03 <= decode.decode_step_s * (1 + 1e-9) <= 0.03 * (1 + 0.05 * DISTURBED)


@given(cost=costs, first=st.integers(1, 5), times=st.floats(10.0, 1e5))
def test_compilation_in_the_first_steps_is_forgotten(cost: StepCost, first: int, times: float):
    rates = StepRates()
    for _ in range(first):
        rates.add(512, 0, cost.step_s(512) * times)
        rates.add(0, 8, cost.step_s(8) * times)
    for _ in range(3):
        rates.add(512, 0, cost.step_s(512))
        rates.add(0, 8, cost.step_s(8))
    assert learned(rates) == pytest.approx(cost, rel=1e-6, abs=1e-9)
    assert rates.prompt_tokens_per_s == pytest.approx(512 / cost.step_s(512))
    assert rates.decode_step_s == pytest.approx(cost.step_s(8))


@given(steps=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(allow_nan=True, allow_infinity=True))))
def test_it_is_always_a_number_and_never_negative(steps: list[tuple[int, int, float]]):
    rates = StepRates()
    for step in steps:
        rates.add(*step)
        told = (rates.prompt_tokens_per_s, rates.decode_step_s, *(rates.cost or ()))
        assert all(math.isfinite(value) and value >= 0 for value in told)


def test_it_follows_a_machine_that_becomes_slower_and_faster():
    rng, rates, cost = Random(1), StepRates(), StepCost(0.02, 0.0006)
    for share in (1.0, 20.0, 0.5):
        now = StepCost(cost.fixed_s * share, cost.token_s * share)
        run(rates, now, rng, 600)
        assert learned(rates).step_s(200) == pytest.approx(now.step_s(200), rel=0.05)


def test_short_prompts_do_not_hide_the_rate_of_long_ones():
    """A router's probes have a few tokens. A first long prompt afterwards says what the engine computes in a second."""
    rates = StepRates()
    for _ in range(16):
        rates.add(4, 0, 0.02)
    rates.add(512, 0, 0.3)
    assert rates.prompt_tokens_per_s == pytest.approx(512 / 0.3, rel=0.15)


def test_prompts_are_remembered_while_only_decodes_run():
    rates = StepRates()
    for _ in range(4):
        rates.add(512, 8, 0.33)
    for _ in range(10_000):
        rates.add(0, 8, 0.03)
    assert learned(rates).step_s(520) == pytest.approx(0.33)


def test_nothing_is_known_before_the_second_step_with_prompts():
    rates = StepRates()
    for _ in range(100):
        rates.add(0, 8, 0.03)
    rates.add(512, 0, 0.3)
    assert rates.cost is None
    rates.add(512, 0, 0.3)
    assert rates.cost is not None


def test_a_rate_that_was_known_stays_known_when_a_fast_probe_shows_that_it_is_of_the_past() -> None:
    """The largest step at the start was disturbed, and the worker computes nothing but probes after it."""
    rates = StepRates()
    rates.add(128, 0, 0.8)
    assert rates.prompt_tokens_per_s == pytest.approx(160)
    rates.add(17, 0, 0.01)
    assert rates.prompt_tokens_per_s == pytest.approx(1700), "the start's rate is too slow, and no rate would be worse"
    rates.add(512, 0, 0.1)
    assert rates.prompt_tokens_per_s > 4000


def test_probes_tell_no_rate_of_prompts() -> None:
    """A step of two tokens takes as long as one of hundreds, so their rate says nothing of a queue of prompts."""
    rates = StepRates()
    for _ in range(20):
        rates.add(2, 0, 0.02)
    assert rates.prompt_tokens_per_s == 0.0
    rates.add(512, 0, 0.1)
    assert rates.prompt_tokens_per_s > 4000
