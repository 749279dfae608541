"""Who is silent is lost only by evidence: by time that we have served ourselves, and while nothing beats beside the stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdserve.rpc.beats import Silence

LOST_S, STUCK_S = 5.0, 30.0


def silence() -> Silence:
    return Silence(lost_s=LOST_S, due_s=1.0, stuck_s=STUCK_S)


def looks_until_lost(one: Silence, passed_s: float, *, beats: bool) -> int:
    return next(number for number in range(1, 100) if one.look(passed_s, number if beats else 0))


def test_a_peer_of_which_nothing_is_heard_is_lost() -> None:
    assert looks_until_lost(silence(), 1.0, beats=False) == 6


def test_a_stream_that_brings_nothing_is_broken_late_while_its_peer_beats() -> None:
    one = silence()
    assert looks_until_lost(one, 1.0, beats=True) == 31


def test_any_message_of_the_stream_shows_life() -> None:
    one = silence()
    for _ in range(100):
        assert not one.look(1.0)
        one.heard()
    assert looks_until_lost(one, 1.0, beats=False) > 1


@given(st.lists(st.floats(1.0, 1000.0), min_size=5, max_size=5))
def test_the_time_by_which_a_process_was_itself_late_counts_against_nobody(passed: list[float]) -> None:
    """However late each of five looks is, they are five seconds."""
    one = silence()
    assert not any(one.look(passed_s) for passed_s in passed)
    assert one.look(1.0)


def test_beats_that_stop_prove_nothing_against_a_stream_that_goes_on() -> None:
    one = silence()
    one.look(1.0, beats=3)
    for _ in range(100):
        one.heard()
        assert not one.look(1.0, beats=3)
