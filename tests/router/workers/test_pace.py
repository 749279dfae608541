"""The pace of commands: nobody waits in calm, and a rush has few passages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.workers.pace import BURST, CALM_PER_S, PACE_S, Pace


def passages(gaps_s: list[float]) -> tuple[list[float], list[float]]:
    """Say a command after each gap. Return the times of the passages, and the wait of each command."""
    pace, now_s, due_s = Pace(), 100.0, None
    passed: list[float] = []
    waits: list[float] = []
    for gap_s in gaps_s:
        now_s += gap_s
        if due_s is not None and due_s <= now_s:
            pace.passed(due_s)
            passed.append(due_s)
            due_s = None
        pace.said(now_s)
        if due_s is None:
            due_s = now_s + pace.wait_s(now_s)
        waits.append(due_s - now_s)
    return passed, waits


@given(st.lists(st.floats(0, 0.1), max_size=200))
def test_no_command_waits_longer_than_the_pace(gaps_s: list[float]) -> None:
    _, waits = passages(gaps_s)
    assert all(wait_s <= PACE_S + 1e-9 for wait_s in waits)


@given(st.integers(1, BURST // 2), st.integers(1, 50))
def test_no_command_waits_below_the_calm_rate(at_once: int, times: int) -> None:
    gaps_s = [*(0.0 for _ in range(at_once - 1)), 1.01 * at_once / CALM_PER_S]
    _, waits = passages(gaps_s * times)
    assert not any(waits)


def test_a_rush_shares_passages_and_the_calm_after_it_does_not() -> None:
    rush = [0.5 / CALM_PER_S] * 2000
    passed, waits = passages(rush)
    assert len(passed) < 1.2 * sum(rush) / PACE_S + 2 * BURST
    assert any(waits)
    _, waits = passages([*rush, 2 * BURST / CALM_PER_S, 0.001])
    assert waits[-2:] == [0.0, 0.0]
