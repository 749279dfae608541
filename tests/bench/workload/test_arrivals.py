"""Arrivals: the mean rate and the spread of drawn gaps, and that another rate changes nothing but the times."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise
from statistics import fmean, pvariance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve_bench.workload.request import Arrivals
from pdserve_bench.workload.spec import read_spec
from pdserve_bench.workload.workload import Workload

DRAWS = 20_000


def times_s(arrivals: Arrivals, count: int, seed: int = 0, share: float = 1.0) -> list[float]:
    found = [one for one in islice(arrivals.times_s(seed, share), count) if one is not None]
    assert len(found) == count
    return found


@pytest.mark.parametrize(("kind", "burstiness"), [("poisson", 1.0), ("gamma", 0.25), ("gamma", 4.0)])
def test_drawn_gaps_have_the_mean_and_the_variance_of_their_process(kind, burstiness):
    """The gaps of a gamma process with shape k and mean m have the variance m * m / k."""
    rate_per_s = 8.0
    gaps_s = [b - a for a, b in pairwise(times_s(Arrivals(kind=kind, rate_per_s=rate_per_s, burstiness=burstiness), DRAWS))]
    deviation = (1 / burstiness) ** 0.5 / DRAWS**0.5  # of the mean of so many gaps, as a share of it
    assert fmean(gaps_s) * rate_per_s == pytest.approx(1.0, abs=4 * deviation)
    assert pvariance(gaps_s) * rate_per_s**2 * burstiness == pytest.approx(1.0, rel=0.15)


def test_constant_arrivals_have_equal_gaps():
    assert times_s(Arrivals(kind="constant", rate_per_s=4.0), 4) == [0.25, 0.5, 0.75, 1.0]


def test_the_share_of_requests_that_begin_conversations_lowers_the_rate():
    assert times_s(Arrivals(kind="constant", rate_per_s=4.0), 2, share=0.5) == [0.5, 1.0]


def test_all_at_once_and_closed_loops_draw_no_times():
    assert times_s(Arrivals(kind="inf"), 3) == [0.0, 0.0, 0.0]
    assert list(islice(Arrivals(kind="closed").times_s(0), 3)) == [None, None, None]


@given(st.sampled_from(["poisson", "gamma"]), st.integers(0, 1 << 62), st.floats(0.01, 1e4), st.floats(0.01, 1e4))
def test_another_rate_stretches_the_same_gaps(kind, seed, first, second):
    arrivals = Arrivals(kind=kind, rate_per_s=first)
    one, other = times_s(arrivals, 20, seed), times_s(arrivals.with_rate(second), 20, seed)
    assert [time_s * first for time_s in one] == pytest.approx([time_s * second for time_s in other])


@settings(max_examples=10)
@given(
    st.sampled_from(["random:40/8", "sessions:turns=2,prompt=20,output=4,fork_share=0.5"]),
    st.floats(0.1, 1e3),
    st.integers(0, 99),
)
def test_with_rate_changes_nothing_but_times(form, rate_per_s, seed):
    workload = Workload(read_spec(form, ["vocab_size=500", "classes.a=1", "classes.b=2"]), None)
    arrivals = Arrivals(rate_per_s=2.0)
    slow = list(islice(workload.requests(arrivals, seed), 12))
    fast = list(islice(workload.requests(arrivals.with_rate(rate_per_s), seed), 12))
    assert [replace(one, send_at_s=None) for one in slow] == [replace(one, send_at_s=None) for one in fast]


def test_the_rate_counts_all_requests_of_conversations():
    workload = Workload(read_spec("sessions:turns=4,prompt=5,output=2", ["vocab_size=500"]), None)
    requests = list(islice(workload.requests(Arrivals(kind="constant", rate_per_s=8.0), 1), 4 * 50))
    starts_s = [one.send_at_s for one in requests if one.send_at_s is not None]
    assert starts_s == pytest.approx([0.5 * place for place in range(1, 51)])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rate_per_s": 0.0}, "arrivals.rate_per_s must be above 0"),
        ({"rate_per_s": float("inf")}, "all at once is kind inf"),
        ({"rate_per_s": float("nan")}, "arrivals.rate_per_s"),
        ({"kind": "closed", "rate_per_s": 1.0}, "arrivals.rate_per_s has no meaning with kind closed"),
        ({"kind": "gamma", "burstiness": 0.0}, "arrivals.burstiness must be above 0"),
        ({"burstiness": 2.0}, "arrivals.burstiness has no meaning with kind poisson"),
        ({"kind": "normal"}, "arrivals.kind must be one of"),
    ],
)
def test_a_wrong_field_is_named(fields, named):
    with pytest.raises(ConfigError, match=named):
        Arrivals(**fields)


def test_drawn_arrivals_without_a_rate_are_refused_before_any_request():
    workload = Workload(read_spec("random:40/8", ["vocab_size=500"]), None)
    with pytest.raises(ConfigError, match=r"arrivals.rate_per_s must be set for kind poisson"):
        workload.requests(workload.spec.arrivals, 0)
    with pytest.raises(ConfigError, match=r"arrivals.kind trace needs a source with times"):
        workload.requests(Arrivals(kind="trace"), 0)
