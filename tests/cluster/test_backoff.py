"""Restarts by a rate, on a clock that the tests move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cluster.backoff import Backoff

GAPS_S = st.lists(st.floats(0, 3000), max_size=60)


def test_it_grows_and_gives_up_and_forgets() -> None:
    backoff = Backoff(tries=3, window_s=10.0)
    assert [backoff.next_delay_s(0.0) for _ in range(4)] == [0.2, 0.4, 0.8, None]
    assert backoff.next_delay_s(11.0) == 0.2


@given(gaps_s=GAPS_S, tries=st.integers(0, 8))
def test_no_window_holds_more_restarts_than_its_tries(gaps_s: list[float], tries: int) -> None:
    backoff, now_s, starts = Backoff(tries=tries, window_s=3600.0, first_s=1.0, longest_s=60.0), 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        recent = [start for start in starts if now_s - start < 3600.0]
        delay_s = backoff.next_delay_s(now_s)
        assert (delay_s is None) == (len(recent) == tries)
        if delay_s is not None:
            assert delay_s == min(60.0, 2.0 ** len(recent))
            starts.append(now_s)


@given(gaps_s=st.lists(st.floats(3601.0 / 6, 10 * 86_400.0), min_size=100, max_size=100))
def test_what_dies_less_often_than_the_rate_lives_for_ever(gaps_s: list[float]) -> None:
    """Counted over its life, the fourth of these deaths was the last."""
    backoff, now_s = Backoff(tries=6, window_s=3600.0), 0.0
    for gap_s in gaps_s:
        now_s += gap_s
        assert backoff.next_delay_s(now_s) is not None


@pytest.mark.parametrize("tries", [50, 5000])
def test_many_tries_neither_wait_for_ever_nor_overflow(tries: int) -> None:
    backoff = Backoff(tries=tries, longest_s=5.0)
    delays = [backoff.next_delay_s(0.0) for _ in range(tries)]
    assert max(delay for delay in delays if delay is not None) == 5.0
    assert backoff.next_delay_s(0.0) is None
