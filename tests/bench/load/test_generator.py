"""The generator in virtual time: every planned request has exactly one row, at the right time and in the right order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.core.errors import ConfigError
from pdserve_bench.load.schedule import MAX_CONCURRENCY, RunLimits
from pdserve_bench.load.target import ANSWER_GONE, MIXED_PROMPT, NEVER_SENT, NO_TOKENS, PREDECESSOR_FAILED, TIMEOUT
from pdserve_bench.load.watch import MAX_MESSAGE_CHARS, MAX_REASONS, RunProgress
from pdserve_bench.row import STOPPED
from pdserve_bench.workload.request import AnswerOf, BenchRequest
from tests.bench.load.fake_target import FakeTarget, Script, run_virtually

ms = st.integers(0, 50).map(lambda n: n / 1000)


def one(number: int, send_at_s: float | None = None, **fields: object) -> BenchRequest:
    return BenchRequest(number=number, prompt=(f"p{number}",), max_tokens=4, send_at_s=send_at_s, **fields)  # type: ignore[arg-type]


@st.composite
def graphs(draw: st.DrawFn) -> list[BenchRequest]:
    """Requests with times and without, chains, forks and joins."""
    size = draw(st.integers(1, 24))
    requests, at_s = [], 0.0
    for number in range(size):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number and draw(st.booleans()) else set()
        at_s += draw(ms)
        send_at_s = at_s if draw(st.booleans()) else None
        requests.append(one(number, send_at_s, after=tuple(sorted(after)), think_s=draw(ms)))
    return requests


scripts = st.builds(Script, st.lists(ms, max_size=4).map(tuple), st.sampled_from(["", "", "", "broken"]))


@settings(max_examples=15, deadline=None)
@given(requests=graphs(), answers=st.lists(scripts, min_size=24, max_size=24), places=st.none() | st.integers(1, 4))
def test_every_request_has_one_row_at_its_time(requests: list[BenchRequest], answers: list[Script], places: int | None) -> None:
    target = FakeTarget(lambda number: answers[number])
    rows = {row.number: row for row in run_virtually(requests, target, RunLimits(max_concurrency=places))}

    assert sorted(rows) == [request.number for request in requests]
    assert target.most <= (places or MAX_CONCURRENCY)
    assert len(target.calls) == sum(row.error not in NEVER_SENT for row in rows.values())
    for request in requests:
        row = rows[request.number]
        before = [rows[number] for number in request.after]
        if any(not other.ok for other in before):
            assert row.error == PREDECESSOR_FAILED
            assert row.output_tokens == 0
            continue
        script = answers[request.number]
        assert row.error == (script.error or ("" if script.delays_s else NO_TOKENS))
        assert row.output_tokens == len(script.delays_s) == sum(count for _, count in row.arrivals)
        due_s = max([request.send_at_s or 0.0, *(other.ended_s + request.think_s for other in before)])
        assert row.planned_s >= due_s - 1e-9
        assert row.send_lag_s == pytest.approx(0.0, abs=1e-6)
        if places is None and (request.send_at_s is not None or before):
            assert row.planned_s == pytest.approx(due_s)
        assert row.e2e_s == pytest.approx(sum(script.delays_s))


def test_open_loop_sends_whatever_the_server_does() -> None:
    """A server that stands still delays no request, so nothing that it does is left out of the figures."""
    target = FakeTarget(lambda number: Script((100.0,)))
    rows = run_virtually([one(n, n / 10) for n in range(50)], target, RunLimits())
    assert target.most == 50
    assert [row.sent_s for row in rows] == pytest.approx([n / 10 for n in range(50)])


def test_late_generator_says_so_in_the_row() -> None:
    """Making the second prompt takes 5 s, so it is sent late: its lag is in its row, and its plan stays."""
    passed_s = 0.0

    def slow() -> Iterator[BenchRequest]:
        nonlocal passed_s
        yield one(0, 0.1)
        passed_s = 5.0
        yield one(1, 0.2)

    rows = run_virtually(slow(), FakeTarget(), RunLimits(), late_s=lambda: passed_s)
    assert [row.planned_s for row in rows] == pytest.approx([0.1, 0.2])
    assert [row.sent_s for row in rows] == pytest.approx([5.0, 5.0])


def test_messages_of_failures_are_bounded_lines() -> None:
    progress = RunProgress()
    progress.explain("bad", "\x1b[2Jfirst\r\n" + "x" * 10_000)
    progress.explain("bad", "second")
    for number in range(1_000):
        progress.explain(f"reason_{number}", "said")
    assert progress.messages["bad"].startswith("[2Jfirst xxx")
    assert (len(progress.messages), len(progress.messages["bad"])) == (MAX_REASONS, MAX_MESSAGE_CHARS + 3)


def test_concurrency_limit_moves_the_plan() -> None:
    """A request that waits for a place is planned for the moment at which it gets one, and the run says how many waited."""
    target, progress = FakeTarget(lambda number: Script((1.0,))), RunProgress()
    rows = run_virtually([one(n, 0.0) for n in range(4)], target, RunLimits(max_concurrency=1), progress=progress)
    assert [row.planned_s for row in rows] == pytest.approx([0.0, 1.0, 2.0, 3.0])
    assert (progress.held, progress.sent, progress.done) == (3, 4, 4)


def test_later_turns_go_before_new_conversations() -> None:
    """Ready requests without a time do not hold up those that continue a conversation."""
    requests = [one(0), one(1, after=(0,)), *(one(n) for n in range(2, 40))]
    rows = run_virtually(requests, FakeTarget(), RunLimits(max_concurrency=2))
    assert [row.number for row in rows].index(1) <= 3


def test_earlier_answers_become_prompts() -> None:
    text = [one(0), BenchRequest(1, ("a", AnswerOf(0), "b"), 4, after=(0,))]
    target = FakeTarget()
    run_virtually(text, target, RunLimits())
    assert target.calls[1].prompt == "a<0.0><0.1>b"
    ids = [one(0), BenchRequest(1, ((7, 8), AnswerOf(0)), 4, after=(0,))]
    target = FakeTarget()
    run_virtually(ids, target, RunLimits())
    assert target.calls[1].prompt == (7, 8, 0, 1)


def test_prompts_that_cannot_be_filled_are_rows() -> None:
    requests = [
        one(0),
        BenchRequest(1, ((7,), "text", AnswerOf(0)), 4, after=(0,)),
        BenchRequest(2, ("a", AnswerOf(1)), 4),
        one(3, after=(1,)),
    ]
    rows = {row.number: row.error for row in run_virtually(requests, FakeTarget(), RunLimits())}
    assert rows == {0: "", 1: MIXED_PROMPT, 2: ANSWER_GONE, 3: PREDECESSOR_FAILED}


def test_long_chain_behind_a_failure_ends() -> None:
    requests = [one(0), *(one(n, after=(n - 1,)) for n in range(1, 5000))]
    rows = run_virtually(requests, FakeTarget(lambda number: Script(error="broken")), RunLimits())
    assert [row.error for row in rows] == ["broken", *[PREDECESSOR_FAILED] * 4999]


def endless(gap_s: float) -> Iterator[BenchRequest]:
    return (one(n, n * gap_s) for n in itertools.count())


def test_run_ends_by_its_limits() -> None:
    rows = run_virtually(endless(0.1), FakeTarget(), RunLimits(num_requests=7, warmup_requests=3))
    assert [row.warm_up for row in rows] == [True] * 3 + [False] * 7
    rows = run_virtually(endless(0.1), FakeTarget(), RunLimits(duration_s=1.05, warmup_s=0.95))
    assert (sum(row.warm_up for row in rows), sum(not row.warm_up for row in rows)) == (10, 10)
    rows = run_virtually(endless(0.1), FakeTarget(), RunLimits(duration_s=1.05, warmup_requests=5))
    assert (sum(row.warm_up for row in rows), sum(not row.warm_up for row in rows)) == (5, 11)


def test_limit_of_time_holds_without_arrivals() -> None:
    assert run_virtually(endless(1e9).__iter__(), FakeTarget(), RunLimits(duration_s=1.0), until_s=10.0) != []
    requests = [one(0, 1e9)]
    assert run_virtually(requests, FakeTarget(), RunLimits(duration_s=1.0), until_s=10.0) == []


def test_request_that_hangs_times_out() -> None:
    target = FakeTarget(lambda number: Script((0.1, 1e6)))
    (row,) = run_virtually([one(0, 0.0)], target, RunLimits(request_timeout_s=5.0))
    assert (row.error, row.output_tokens, row.e2e_s) == (TIMEOUT, 1, pytest.approx(5.0))


def test_bug_of_a_target_is_a_row(caplog: pytest.LogCaptureFixture) -> None:
    def script(number: int) -> Script:
        raise ZeroDivisionError

    (row,) = run_virtually([one(0)], FakeTarget(script), RunLimits())
    assert row.error == "target_bug"
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("how", ["watch", "cancelled"])
def test_run_ended_early_keeps_what_is_known(how: str) -> None:
    """What still runs is cut off: its row says so, counts nowhere, and no call is left."""
    target = FakeTarget(lambda number: Script((0.5,) * 4))
    if how == "watch":
        rows = run_virtually(endless(1.0), target, RunLimits(), lambda row: row.number == 2)
    else:
        rows = run_virtually(endless(1.0), target, RunLimits(), cancel_at_s=4.1)
    assert [row.error for row in rows] == ["", "", "", *[STOPPED] * (len(rows) - 3)]
    assert all(row.output_tokens for row in rows if row.cut and row.ended_s - row.sent_s > 0.6)
    assert [row.counts for row in rows] == [not row.cut for row in rows]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("duration_s", 0.0),
        ("num_requests", 0),
        ("max_concurrency", 1 << 17),
        ("warmup_s", -1.0),
        ("request_timeout_s", float("nan")),
    ],
)
def test_limits_name_what_is_wrong(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        RunLimits(**{field: value})  # type: ignore[arg-type]
