"""Each figure of a summary equals its definition, written once more in plain Python."""

from __future__ import annotations

import io
import math
import statistics

import pytest
from hypothesis import given, settings
from rich.console import Console

from pdserve_bench.layout import Slo
from pdserve_bench.load.target import NEVER_SENT
from pdserve_bench.report.summary import STALL_S, Distribution, summarise
from pdserve_bench.report.table import summary_table
from pdserve_bench.row import BenchRow
from tests.bench.report.rows import plausible, runs

SLOS = {"voice": Slo(0.2, 0.1), "": Slo(0.5, None)}


def slo_of(name: str) -> Slo:
    return SLOS.get(name, Slo())


def percentile(values: list[float], percent: float) -> float:
    """Return numpy's linear percentile, as its documentation defines it."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = math.floor(rank)
    return ordered[below] + (ordered[min(below + 1, len(ordered) - 1)] - ordered[below]) * (rank - below)


def same(got: Distribution | None, values: list[float]) -> None:
    if not values:
        assert got is None
        return
    assert got is not None
    assert got.count == len(values)
    assert got.mean == pytest.approx(statistics.fmean(values), rel=1e-9, abs=1e-9)
    assert got.max == max(values)
    for percent in (50, 90, 95, 99):
        assert getattr(got, f"p{percent}") == pytest.approx(percentile(values, percent), rel=1e-9, abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(runs())
def test_times_are_those_of_answered_requests_that_count(rows: tuple[BenchRow, ...]) -> None:
    got = summarise(rows, slo_of)
    ok = [row for row in rows if row.counts and not row.error]
    same(got.ttft_s, [row.ttft_s for row in ok if row.ttft_s is not None])
    same(got.tpot_s, [row.tpot_s for row in ok if row.tpot_s is not None])
    same(got.itl_s, [gap for row in ok for gap in row.gaps_s])
    same(got.e2e_s, [row.e2e_s for row in ok])
    same(got.queue_s, [row.served.queue_s for row in ok if row.served.queue_s is not None])
    same(got.prefill_s, [row.served.prefill_s for row in ok if row.served.prefill_s is not None])
    same(got.transfer_s, [row.served.transfer_s for row in ok if row.served.transfer_s is not None])
    exposed = [row.served.exposed_transfer_s for row in ok]
    same(got.exposed_transfer_s, [one for one in exposed if one is not None])
    same(got.send_lag_s, [row.send_lag_s for row in rows if row.counts and row.error not in NEVER_SENT])
    gaps = [gap for row in ok for gap in row.gaps_s]
    assert got.stall_share == (pytest.approx(sum(gap > STALL_S for gap in gaps) / len(gaps)) if gaps else None)


@settings(max_examples=25, deadline=None)
@given(runs())
def test_counts_and_rates_are_over_the_measured_span(rows: tuple[BenchRow, ...]) -> None:
    got = summarise(rows, slo_of, workers=4)
    measured = [row for row in rows if row.counts]
    ok = [row for row in measured if not row.error]
    good = [row for row in ok if slo_of(row.slo_class).met(row.ttft_s, row.tpot_s)]
    assert (got.requests, got.completed, got.attained) == (len(measured), len(ok), len(good))
    assert got.requests == got.completed + sum(got.errors.values())
    for one in got.classes.values():  # a failed request did not attain
        assert one.attainment == pytest.approx(one.attained / one.requests)
    assert got.warm_up + got.cut + got.requests == len(rows)
    if not measured:
        assert got.span_s is got.attainment is got.goodput_per_s is None
        return
    span_s = max(row.ended_s for row in measured) - min(row.sent_s for row in measured)
    assert got.span_s == span_s
    assert got.attainment == pytest.approx(len(good) / len(measured))
    if span_s:
        assert got.requests_per_s == pytest.approx(len(ok) / span_s)
        assert got.prompt_tokens_per_s == pytest.approx(sum(row.prompt_tokens for row in ok) / span_s)
        assert got.output_tokens_per_s == pytest.approx(sum(row.output_tokens for row in ok) / span_s)
        assert got.goodput_per_s == pytest.approx(len(good) / span_s)
        assert got.goodput_per_worker_s == pytest.approx(len(good) / span_s / 4)
    assert sum(one.attained for one in got.classes.values()) == got.attained
    assert sum(one.requests for one in got.classes.values()) == got.requests


@settings(max_examples=25, deadline=None)
@given(runs())
def test_what_the_server_did_not_say_is_unknown_and_not_zero(rows: tuple[BenchRow, ...]) -> None:
    got = summarise(rows, slo_of)
    ok = [row for row in rows if row.counts and not row.error]
    kv = [row.served.kv_bytes for row in ok if row.served.kv_bytes is not None]
    assert got.kv_bytes == (sum(kv) if kv else None)
    attempts = [row.served.attempts for row in rows if row.counts and row.served.attempts is not None]
    assert got.replayed == (sum(count > 1 for count in attempts) if attempts else None)
    placed = [row.served.placement for row in ok if row.served.placement]
    assert got.disaggregated_share == (placed.count("disaggregated") / len(placed) if placed else None)


@settings(max_examples=25, deadline=None)
@given(runs(most=4))
def test_any_summary_can_be_drawn(rows: tuple[BenchRow, ...]) -> None:
    console = Console(record=True, file=io.StringIO(), width=120)
    console.print(summary_table(summarise(rows, slo_of)))


def test_the_table_shows_the_figures() -> None:
    console = Console(record=True, file=io.StringIO(), width=120)
    console.print(summary_table(summarise(plausible(100, 1), slo_of, workers=2)))
    text = console.export_text()
    assert "100, 0 failed" in text
    assert "goodput of a worker" in text
    assert "TTFT" in text
    assert "transfer" not in text  # nobody told it
