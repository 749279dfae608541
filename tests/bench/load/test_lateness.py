"""A run in which the generator was late is refused by exactly two rules."""

from __future__ import annotations

import os

import pytest

from pdserve_bench.load.generator import raised_priority
from pdserve_bench.load.target import PREDECESSOR_FAILED
from pdserve_bench.load.watch import lag_p99_s, refusal
from pdserve_bench.row import BenchRow


def row(number: int, lag_s: float, ttft_s: float, **fields: object) -> BenchRow:
    sent_s = number + lag_s
    arrival = (sent_s + ttft_s, 1)
    return BenchRow(number, float(number), sent_s, arrival[0] + 1, 8, 1, (arrival,), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lag_s", "ttft_s", "says"),
    [
        (0.0099, 1.0, ""),
        (0.0101, 1.0, "above 10 ms"),
        (0.0101, 0.001, "above 10 ms"),
        (0.0049, 0.1, ""),
        (0.0051, 0.1, "above 5% of the median TTFT, 100.00 ms"),
    ],
)
def test_both_rules_hold(lag_s: float, ttft_s: float, says: str) -> None:
    told = refusal([row(number, lag_s, ttft_s) for number in range(100)])
    assert bool(told) == bool(says)
    assert says in told


def test_only_the_last_hundredth_may_be_late() -> None:
    late = [row(number, 1.0, 1.0) for number in range(9)]
    assert refusal(late + [row(number, 0.0, 1.0) for number in range(991)]) == ""
    assert refusal(late + [row(number, 0.0, 1.0) for number in range(800)]) != ""


def test_warm_up_and_unsent_requests_have_no_lag() -> None:
    rows = [row(0, 1.0, 1.0, warm_up=True), row(1, 1.0, 1.0, error=PREDECESSOR_FAILED)]
    assert lag_p99_s(rows) is None
    assert refusal(rows) == ""


def test_requests_that_all_failed_may_still_have_been_late() -> None:
    assert "10 ms" in refusal([row(0, 1.0, 1.0, error="http_500")])


def test_priority_is_raised_only_inside() -> None:
    before = os.sched_getscheduler(0)
    with raised_priority() as real_time:
        assert (os.sched_getscheduler(0) == os.SCHED_RR) == real_time
    assert os.sched_getscheduler(0) == before
