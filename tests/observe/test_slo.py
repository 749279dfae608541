"""Classes in metrics and over the last minutes: what counts as met, missed, good, refused and shed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_metrics import EMPTY, RECORD, changed, values

from pdserve.core.report import RequestRecord
from pdserve.observe.metrics import BUCKET_S, BUCKETS, WINDOW_S, Attainment, Metrics

MET = changed(RECORD, slo_class="chat", ttft_met=True, tpot_met=True)
LATE = changed(MET, ttft_met=False)
FAILED = changed(MET, outcome="overloaded", message="full", ttft_met=False, tpot_met=False, refusal="shed")
LEFT = changed(MET, outcome="cancelled", message="gone")
LEFT_LATE = changed(LEFT, ttft_met=False, tpot_met=None)
FREE = changed(RECORD, slo_class="default")
BROKEN = changed(FREE, outcome="replica_lost", message="lost")


def test_goodput_counts_finished_requests_that_missed_nothing() -> None:
    metrics = Metrics(lambda: EMPTY)
    for record in (MET, MET, LATE, FAILED, LEFT, LEFT_LATE, FREE, BROKEN):
        metrics.finished(record)
    metrics.slo.refused("chat", "class_share")
    assert values(metrics, "pdserve_slo_requests_total") == {
        ("chat", "met", "met"): 2.0,
        ("chat", "met", "missed"): 1.0,
        ("chat", "missed", "missed"): 1.0,
        ("chat", "none", "missed"): 1.0,
        ("default", "none", "none"): 2.0,
    }
    assert values(metrics, "pdserve_slo_good_requests_total") == {("chat",): 2.0, ("default",): 1.0}
    assert values(metrics, "pdserve_slo_refused_requests_total") == {("shed", "chat"): 1.0, ("class_share", "chat"): 1.0}


@pytest.mark.parametrize(
    ("record", "counts", "good"), [(MET, 1, 1), (LATE, 1, 0), (FAILED, 1, 0), (LEFT, 0, 0), (LEFT_LATE, 1, 0)]
)
def test_a_client_that_left_counts_only_if_it_had_waited_too_long(record: RequestRecord, counts: int, good: int) -> None:
    attainment = Attainment()
    attainment.finished(record, 0.0)
    (one,) = attainment.classes(0.0)
    assert (one.slo_class, one.requests, one.good, one.shed) == ("chat", counts, good, record is FAILED)
    assert (one.ttft_met, one.ttft_missed) == (counts and record.report.ttft_met, counts and not record.report.ttft_met)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.0, 30.0), st.sampled_from([MET, LATE, FREE]), st.booleans()), max_size=60))
def test_the_window_holds_the_last_minutes_and_no_more(steps: list[tuple[float, RequestRecord, bool]]) -> None:
    attainment, now_s = Attainment(), 0.0
    seen: list[tuple[float, str]] = []
    for wait_s, record, refused in steps:
        now_s += wait_s
        if refused:
            attainment.refused(record.report.slo_class, now_s)
        else:
            attainment.finished(record, now_s)
        seen.append((now_s, record.report.slo_class))
        assert len(attainment._buckets) <= BUCKETS
    first_s = (now_s // BUCKET_S - BUCKETS + 1) * BUCKET_S
    for one in attainment.classes(now_s):
        assert one.requests + one.refused == sum(at_s >= first_s and name == one.slo_class for at_s, name in seen)
    assert attainment.classes(now_s + WINDOW_S) == ()
