"""What a hostile client makes a model write, in pieces of one character: the parsers read each of them once."""

from __future__ import annotations

import time
from typing import Any

import pytest

from pdserve.text.calls import pythonic
from pdserve.text.calls.events import Content, EventParser, Reasoning
from pdserve.text.calls.output import OutputParser
from pdserve.text.calls.qwen3_coder import types_of
from pdserve.text.calls.reasoning import ReasoningParser
from pdserve.text.calls.registry import CALL_FORMS
from pdserve.text.output import StopScanner

CHARS = 400_000
BOUND_S = 30.0
"""CPU time in which so many characters are read many times over; read in quadratic time, they take a minute and a half."""


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
def test_reasoning_of_many_blanks_or_tags_is_read_in_linear_time(unit):
    text = "x" + unit * (CHARS // len(unit))
    assert spoken(OutputParser(ReasoningParser(opened=True), None), text) == text


def test_an_output_that_begins_with_many_blanks_is_read_in_linear_time():
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


@pytest.mark.parametrize(
    "hidden",
    ["f'{1}'", "rF'{1}'", "fr'{1}'", '\nf"""{1}"""', "1, # '\n1, '", "1 \\\n", "'a\n'"],
)
def test_code_that_hides_among_strings_is_not_parsed(monkeypatch, hidden):
    """Python parses a megabyte of strings at once, and code of a few thousand characters in many milliseconds."""
    parsed: list[str] = []
    monkeypatch.setattr(pythonic, "python_calls", lambda text: parsed.append(text) or [])
    text = f"[f(a=[{hidden}])]"
    assert spoken(OutputParser(None, CALL_FORMS["pythonic"].machine(["f"])), text) == text
    assert not parsed


def test_types_are_found_at_once_where_a_schema_names_its_parts_again_and_again():
    class Part(dict[str, Any]):
        looks = 0

        def get(self, *key: Any) -> Any:
            Part.looks += 1
            assert Part.looks < 2_000
            return super().get(*key)

    parts: dict[str, Any] = {f"a{i}": Part(anyOf=[Part({"$ref": f"#/$defs/a{(i + 1) % 60}"})] * 2) for i in range(60)}
    assert types_of({"$ref": "#/$defs/a0"}, {"$defs": parts}) == frozenset()
    parts["a59"] = {"type": "string"}
    assert types_of({"$ref": "#/$defs/a0"}, {"$defs": parts}) == {"string"}


@pytest.mark.slow
def test_the_worst_stop_strings_are_searched_in_linear_time():
    scanner = StopScanner([f"{'a' * 1_000}{last}" for last in "bcdefghijklmnopq"])
    ends_s = time.thread_time() + BOUND_S
    told = 0
    for _ in range(CHARS):
        told += len(scanner.push("a")[0])
        assert time.thread_time() < ends_s
    assert told + len(scanner.flush()) == CHARS
