"""The test of one rate: how often it errs, and what ends it early."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve_bench.search.trial import BOUNDARY, FIRST_LOOK, Decision, Trial, TrialSettings, effective_count, wilson
from tests.bench.search.servers import Server, Station, run_trial

QUEUE = Server(Station(0.1, 1), prefill_wait_s=1.0)
GOODPUT = 8.92
"""The rate at which 90 % of the requests to QUEUE wait for at most a second: from `Server.goodput`."""


def decisions(factor: float, seeds: int, *, max_s: float = 600.0) -> list[Decision | None]:
    found = []
    for seed in range(seeds):
        trial = Trial(TrialSettings(0.9, GOODPUT * factor, 1.1, 60.0, max_s))
        run_trial(QUEUE, trial, seed)
        found.append(trial.decision)
    return found


def test_the_rate_of_the_constant_is_the_true_one():
    assert QUEUE.attainment(GOODPUT) == pytest.approx(0.9, abs=0.01)


def test_wrong_decisions_are_rare():
    """A yes at 10 % above the goodput, or a no at 10 % below it, is an error. Up to 2 in 40 are chance at a rate of 3 %."""
    above, below = decisions(1.1, 40), decisions(0.9, 40)
    assert above.count(Decision.YES) <= 4
    assert sum(one in (Decision.NO, Decision.OVERLOADED) for one in below) <= 1
    assert sum(one in (Decision.NO, Decision.OVERLOADED) for one in above) >= 32
    assert below.count(Decision.YES) >= 32


def test_far_too_high_a_rate_takes_seconds():
    trial = Trial(TrialSettings(0.9, 30.0, 1.1, 60.0, 600.0))
    assert run_trial(QUEUE, trial, 1) < 20.0
    assert trial.decision in (Decision.NO, Decision.OVERLOADED)


def test_a_backlog_without_end_is_seen_although_no_request_is_late_yet():
    """Nothing is due for a long time, but the cluster serves only half of what arrives."""
    trial = Trial(TrialSettings(0.9, 10.0, 0.0, 10.0, 600.0))
    for number in range(2000):
        trial.plan(number / 10.0)
    for number in range(2000):
        if trial.end(number, number / 5.0 + 0.1, True) is not None:
            break
    assert trial.decision is Decision.OVERLOADED
    assert number < 500


def test_a_cluster_that_fills_up_is_not_overloaded():
    """All requests stay for 20 s: as many run at the end as ever will, and none waits."""
    trial = Trial(TrialSettings(0.9, 10.0, 20.0, 60.0, 600.0))
    for number in range(6000):
        trial.plan(number / 10.0)
    for number in range(6000):
        if trial.end(number, number / 10.0 + 20.0, True) is not None:
            break
    assert trial.decision is Decision.YES


def test_a_slow_request_is_a_miss_before_it_ends():
    trial = Trial(TrialSettings(0.9, 10.0, 0.0, 1.0, 60.0))
    for number in range(200):
        trial.plan(number / 10.0, number / 10.0 + 1.0)
    for number in range(100, 200):  # the first 100 never end
        trial.end(number, number / 10.0 + 0.5, True)
        if trial.decision is not None:
            break
    assert trial.decision in (Decision.NO, Decision.OVERLOADED)
    assert trial.estimate.high < 0.9


def test_requests_of_the_warm_up_do_not_count():
    trial = Trial(TrialSettings(0.9, 10.0, 5.0, 1.0, 60.0))
    for number in range(100):
        trial.plan(number / 10.0)
        trial.end(number, number / 10.0, number >= 50)
    estimate = trial.close(10.0)
    assert (estimate.requests, estimate.attained) == (50, 50)


def test_a_short_run_never_says_yes():
    """It says that it does not know: a rate that is a little too high looks good for a while."""
    trial = Trial(TrialSettings(0.9, 100.0, 0.0, 60.0, 30.0))
    for number in range(3000):
        trial.plan(number / 100.0)
        trial.end(number, number / 100.0, True)
    estimate = trial.close(30.0)
    assert trial.decision is None
    assert estimate.low == 0.9


def test_a_rate_a_little_too_high_is_missed_when_all_late_requests_are_at_the_end():
    """A third of the run is good, since the queue was short: all requests together would decide nothing."""
    trial = Trial(TrialSettings(0.9, 100.0, 0.0, 15.0, 20.0))
    for number in range(1000):
        trial.plan(number / 50.0)
        trial.end(number, number / 50.0, number < 340)
    estimate = trial.close(20.0)
    assert trial.decision is Decision.NO
    assert (estimate.requests, estimate.attained) == (500, 0)
    assert estimate.high < 0.9


@given(st.lists(st.booleans(), min_size=FIRST_LOOK, max_size=300))
@settings(max_examples=60)
def test_the_effective_count_is_never_above_the_count(good):
    count = effective_count(good)
    assert 0.0 < count <= len(good)
    low, high = wilson(sum(good) / len(good), count, BOUNDARY)
    assert 0.0 <= low <= sum(good) / len(good) <= high + 1e-9 <= 1.0 + 1e-9


def test_clusters_of_misses_count_less_than_scattered_ones():
    scattered = [number % 10 > 0 for number in range(320)]
    clustered = [number >= 32 for number in range(320)]
    assert effective_count(clustered) < effective_count(scattered) / 4


def test_batches_that_resemble_their_neighbours_count_less():
    """The same 16 batches, once in turns and once sorted by their means: only the sorted ones say that batches are short."""
    bad, fair = [False] * 4 + [True] * 16, [True] * 20
    assert effective_count((bad + fair) * 8) > 2 * effective_count(bad * 8 + fair * 8)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_order_of_ends_is_judged_in_the_order_of_plans(data):
    """Requests that end early are often the good ones; the first look does not favour them."""
    count = 64
    order = data.draw(st.permutations(range(count)))
    trial = Trial(TrialSettings(0.5, 10.0, 0.0, 1.0, 1e6))
    for number in range(count):
        trial.plan(number * 1e-3, math.inf)
    known: set[int] = set()
    for at, number in enumerate(order):
        trial.end(number, 1.0 + at, number % 2 == 0)
        known.add(number)
        prefix = next((one for one in range(count) if one not in known), count)
        assert len(trial._good) == prefix
