"""A million characters that a hostile client makes a model write, in pieces of one: the parsers read each of them once."""

from __future__ import annotations

import time

import pytest

from pdserve.text.calls.events import Content, EventParser, Reasoning
from pdserve.text.calls.output import OutputParser
from pdserve.text.calls.reasoning import ReasoningParser
from pdserve.text.calls.registry import CALL_FORMS
from pdserve.text.stops import StopScanner

CHARS = 1_000_000
BOUND_S = 60.0
"""CPU time in which a million characters are read many times over; read in quadratic time, they take ten minutes."""


def spoken(parser: EventParser, text: str) -> str:
    """Return the content and the reasoning that become of a text."""
    told: list[str] = []
    ends_s = time.thread_time() + BOUND_S
    for at in range(0, len(text), 10_000):
        assert time.thread_time() < ends_s, f"{at} characters took {BOUND_S} s"
        for char in text[at : at + 10_000]:
            told += [event.text for event in parser.push(char) if isinstance(event, Content | Reasoning)]
    return "".join([*told, *(event.text for event in parser.flush() if isinstance(event, Content | Reasoning))])


@pytest.mark.parametrize("unit", [" ", "\n<"])
def test_reasoning_of_a_million_blanks_or_tags_is_read_in_linear_time(unit):
    text = "x" + unit * (CHARS // len(unit))
    assert spoken(OutputParser(ReasoningParser(opened=True), None), text) == text


def test_an_output_that_begins_with_a_million_blanks_is_read_in_linear_time():
    text = " " * CHARS
    assert spoken(OutputParser(ReasoningParser(opened=False), CALL_FORMS["hermes"].machine(["f"])), text) == text


@pytest.mark.slow
@pytest.mark.parametrize("form", CALL_FORMS)
@pytest.mark.parametrize("shape", ["mark", "name", "list", "object"])
def test_each_form_of_calls_is_read_in_linear_time(form, shape):
    mark = CALL_FORMS[form].machine.mark
    begin, unit = {
        "mark": ("", mark[:1]),
        "name": (f'{mark}{{"name": "', " "),
        "list": (f"{mark}[f(a=", "'' "),
        "object": ("", f"{mark} {{"),
    }[shape]
    text = begin + unit * (CHARS // len(unit))
    assert spoken(OutputParser(None, CALL_FORMS[form].machine(["f"])), text) == text


@pytest.mark.slow
def test_the_worst_stop_strings_are_searched_in_linear_time():
    scanner = StopScanner([f"{'a' * 1_000}{last}" for last in "bcdefghijklmnopq"])
    ends_s = time.thread_time() + BOUND_S
    told = 0
    for _ in range(CHARS):
        told += len(scanner.push("a")[0])
        assert time.thread_time() < ends_s
    assert told + len(scanner.flush()) == CHARS
