"""Stop strings against the plain definition: the first match to end, found in the whole text."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.text.stops import StopScanner

TEXTS = st.text("ab\n", max_size=40)  # two letters and a line end: matches and near matches are common
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)
CUTS = st.lists(st.integers(0, 40), max_size=10)


def first_match(text: str, stops: list[str]) -> int | None:
    """Where the match begins that ends first; of two ending together the longer."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(map(len, ending))
    return None


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


@given(text=TEXTS, stops=STOPS, cuts=CUTS)
@settings(max_examples=500, deadline=None)
def test_the_text_ends_before_the_first_match_however_it_is_cut(text, stops, cuts):
    scanner = StopScanner(stops)
    out, stopped = "", False
    for piece in split(text, cuts):
        given_out, stopped = scanner.push(piece)
        out += given_out
        if stopped:
            break
    start = first_match(text, stops)
    assert stopped == (start is not None)
    assert out + ("" if stopped else scanner.flush()) == text[:start]


@given(text=TEXTS, stops=STOPS)
@settings(max_examples=500, deadline=None)
def test_nothing_that_begins_a_match_leaks_and_nothing_else_is_held(text, stops):
    """After each character exactly the longest end of the text that begins a stop string is held."""
    scanner = StopScanner(stops)
    out = ""
    for end, char in enumerate(text, start=1):
        given_out, stopped = scanner.push(char)
        out += given_out
        if stopped:
            return
        seen = text[:end]
        held = max(n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n]))
        assert out == seen[: len(seen) - held]


@given(text=TEXTS, stops=STOPS, free=st.integers(0, 40))
@settings(max_examples=300, deadline=None)
def test_matches_completed_while_not_honoured_are_text(text, stops, free):
    scanner = StopScanner(stops)
    out, stopped = "", False
    for index, char in enumerate(text):
        given_out, stopped = scanner.push(char, honour=index >= free)
        out += given_out
        if stopped:
            break
    ends = [(end, s) for end in range(free + 1, len(text) + 1) for s in stops if text[:end].endswith(s)]
    if ends:
        end = min(end for end, _ in ends)
        longest = max(len(s) for e, s in ends if e == end)
        assert stopped
        # A part of the match may have been given out as the text of an earlier one that did not count.
        assert text.startswith(out)
        assert len(out) >= end - longest
    else:
        assert not stopped
        assert out + scanner.flush() == text


def test_a_failed_partial_match_is_released_at_once():
    scanner = StopScanner(["</answer>", "</and>"])
    assert scanner.push("x </an") == ("x ", False)  # both may still come
    assert scanner.push("s") == ("", False)
    assert scanner.push("t") == ("</anst", False)
    assert scanner.push("</") == ("", False)
    assert scanner.flush() == "</"


def test_a_string_that_overlaps_itself_is_found_after_a_near_miss():
    scanner = StopScanner(["aab"])
    assert scanner.push("aaa") == ("a", False)
    assert scanner.push("b") == ("", True)


def test_of_two_strings_that_end_together_the_longer_takes_its_text_too():
    assert StopScanner(["END", "THE END"]).push("so THE END.") == ("so ", True)


def test_without_stop_strings_everything_is_given_out():
    scanner = StopScanner([])
    assert scanner.push("anything") == ("anything", False)
    assert scanner.flush() == ""
