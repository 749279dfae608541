"""Stop strings against the plain definition: the first match to end, found in the whole text."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.text.output import StopScanner

TEXTS = st.text("ab\n", max_size=40)  # two letters and a line end: matches and near matches are common
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), min_size=1, max_size=4)
CUTS = st.lists(st.integers(0, 40), max_size=10)


def first_match(text: str, stops: list[str], free: int = 0) -> int | None:
    """Where the match begins that ends first after the first `free` characters; of two ending together the longer."""
    for end in range(free + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end - max(map(len, ending))
    return None


def split(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(edges)]


def cuttings(text: str) -> list[list[str]]:
    """Every way to cut a text into pieces, none of them empty."""
    counts = range(len(text) or 1)
    return [split(text, list(cuts)) for count in counts for cuts in itertools.combinations(range(1, len(text)), count)]


@given(text=st.text("ab", max_size=7), stops=STOPS, free=st.integers(0, 7))
@settings(max_examples=200, deadline=None)
def test_every_cutting_gives_out_what_the_whole_text_does(text, stops, free):
    """Strings that the first `free` characters complete are ordinary text; the two parts are cut in all ways each."""
    start = first_match(text, stops, free)
    for early, late in itertools.product(cuttings(text[:free]), cuttings(text[free:])):
        scanner = StopScanner(stops)
        out, stopped = "", False
        for piece, honour in [(p, False) for p in early] + [(p, True) for p in late]:
            given_out, stopped = scanner.push(piece, honour=honour)
            out += given_out
            if stopped:
                break
        assert stopped == (start is not None)
        assert out + scanner.flush() == text[:start]


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
    start = first_match(text, stops, free)
    assert stopped == (start is not None)
    assert out + scanner.flush() == text[:start]


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


def test_a_string_that_begins_in_text_that_may_not_end_a_request_counts_when_it_is_completed_later():
    scanner = StopScanner(["ab", "bc"])
    assert scanner.push("xab", honour=False) == ("xa", False)
    assert scanner.push("c") == ("", True)


def test_of_two_strings_that_end_together_the_longer_takes_its_text_too():
    assert StopScanner(["END", "THE END"]).push("so THE END.") == ("so ", True)


def test_without_stop_strings_everything_is_given_out():
    scanner = StopScanner([])
    assert scanner.push("anything") == ("anything", False)
    assert scanner.flush() == ""
