"""What a worker tells of its loading, and when its log hears of it."""

from __future__ import annotations

import logging

import pytest

from pdserve.worker.start_report import SAY_S, LoadProgress


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_the_rate_is_that_of_the_present_work(caplog: pytest.LogCaptureFixture) -> None:
    """(1) A conversion takes long, and is logged now and then. (2) Reading begins anew, and is told at its own rate."""
    clock = Clock()
    progress = LoadProgress(clock)
    assert progress.state is None
    with caplog.at_level(logging.INFO):
        for second in range(int(2 * SAY_S) + 1):
            clock.now_s = 100.0 + second
            progress("converting", second * 10**9, 100 * 10**9)
    assert [record.message for record in caplog.records] == [
        "converting: 5.00 of 100.00 GB, 1.00 GB/s",
        "converting: 10.00 of 100.00 GB, 1.00 GB/s",
    ]
    progress("loading weights", 0, 3 * 10**9)
    clock.now_s += 0.5
    progress("loading weights", 10**9, 3 * 10**9)
    assert str(progress.state) == "loading weights: 1.00 of 3.00 GB, 2.00 GB/s"


def test_work_of_unknown_size_has_no_bytes() -> None:
    progress = LoadProgress(Clock())
    progress("downloading ORG/NAME", 0, 1)
    assert str(progress.state) == "downloading ORG/NAME"
