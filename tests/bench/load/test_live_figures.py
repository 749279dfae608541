"""The figures of the last seconds are those of the rows that ended then."""

from __future__ import annotations

import pytest

from pdserve_bench.commands.run_session import line
from pdserve_bench.layout import Slo
from pdserve_bench.load.watch import LiveFigures, RunProgress
from pdserve_bench.row import BenchRow


def row(number: int, ended_s: float, ttft_s: float = 0.2, **fields: object) -> BenchRow:
    arrivals = ((ended_s - 1 + ttft_s, 1), (ended_s, 1))
    return BenchRow(number, ended_s - 1, ended_s - 1, ended_s, 8, 2, arrivals, **fields)  # type: ignore[arg-type]


def test_window_forgets_what_is_older() -> None:
    figures = LiveFigures(lambda name: Slo(0.3, None), duration_s=60.0, requests=1000)
    for number in range(10):
        figures.add(row(number, float(number + 1)))
    for number in range(10, 20):
        figures.add(
            row(number, float(number + 1), ttft_s=0.9 if number == 19 else 0.4, error="http_500" if number == 19 else "")
        )
    live = figures.of(RunProgress(now_s=20.5, sent=25, done=19, failed=1))
    assert live.requests_per_s == pytest.approx(0.9)
    assert live.tokens_per_s == pytest.approx(1.8)
    assert live.goodput_per_s == 0.0
    assert (live.ttft_p50_s, live.itl_p99_s) == (pytest.approx(0.4), pytest.approx(0.6))
    assert live.ttft_p99_s == pytest.approx(0.4)  # the request that failed has none
    assert live.eta_s == pytest.approx(39.5)
    assert "25 sent, 0 running, 19 done, 1 failed" in line(live)


def test_nothing_yet() -> None:
    live = LiveFigures(lambda name: Slo()).of(RunProgress())
    assert (live.requests_per_s, live.ttft_p50_s, live.eta_s) == (0.0, None, None)
    assert "TTFT p50 - p99 -" in line(live)
