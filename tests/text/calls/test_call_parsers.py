"""Calls in the text of a model: well-formed ones are read, others stay content, however the text is cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdserve.text.calls.events import CallArguments, CallBegin, CallEnd, Content, Event, EventParser, Reasoning
from pdserve.text.calls.forms import RequiredCalls
from pdserve.text.calls.output import NamedCall, OutputParser
from pdserve.text.calls.reasoning import ReasoningParser
from pdserve.text.calls.registry import CALL_FORMS, call_form, reasoning_form

NAMES = ("f", "get_weather", "a.b")
Call = tuple[str, dict[str, Any]]


def parser_of(form: str, *, most: int | None = None) -> OutputParser:
    return OutputParser(None, CALL_FORMS[form].machine(NAMES), max_calls=most)


def parsed(parser: EventParser, pieces: list[str]) -> list[Event]:
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.flush())


def joined(events: list[Event]) -> list[Event]:
    """Join neighbours of the same kind."""
    made: list[Event] = []
    for event in events:
        if isinstance(event, Content | Reasoning | CallArguments):
            assert event.text, "no event is empty"
            if made and type(made[-1]) is type(event):
                event = type(event)(made.pop().text + event.text)  # type: ignore[union-attr]
        made.append(event)
    return made


def totals(events: list[Event]) -> tuple[str, list[tuple[str, str]]]:
    """Return all content and all calls."""
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallBegin):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return "".join(event.text for event in events if isinstance(event, Content)), calls


def read(form: str, text: str, *, most: int | None = None) -> tuple[str, list[Call]]:
    content, calls = totals(parsed(parser_of(form, most=most), [text]))
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


def objects(calls: list[Call], key: str = "arguments") -> list[str]:
    return [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]


def python(value: Any) -> str:
    return repr(value)


def fenced(calls: list[Call]) -> str:
    inner = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def bare(calls: list[Call]) -> str:
    inner = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>" for name, arguments in calls
    )
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def as_python(calls: list[Call]) -> str:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})" for name, arguments in calls]
    return f"[{', '.join(written)}]"


def as_markup(calls: list[Call]) -> str:
    """Without a schema, values are JSON."""
    written = []
    for name, arguments in calls:
        inner = "".join(f"<parameter={key}>\n{json.dumps(value)}\n</parameter>\n" for key, value in arguments.items())
        written.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(written)


WRITERS = {
    "hermes": ("hermes", lambda calls: "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects(calls))),
    "mistral, a list": ("mistral", lambda calls: f"[TOOL_CALLS] [{', '.join(objects(calls))}]"),
    "mistral, names": ("mistral", lambda calls: "".join(f"[TOOL_CALLS]{name}{json.dumps(one)}" for name, one in calls)),
    "mistral, marks": (
        "mistral",
        lambda calls: "".join(f"[TOOL_CALLS]{name}[CALL_ID]x9[ARGS]{json.dumps(one)}" for name, one in calls),
    ),
    "granite": ("granite", lambda calls: f"<|tool_call|>[{', '.join(objects(calls))}]"),
    "llama 3": ("llama3_json", lambda calls: "; ".join(objects(calls, "parameters"))),
    "llama 3, tag": ("llama3_json", lambda calls: "<|python_tag|>" + "; ".join(objects(calls, "parameters"))),
    "deepseek v3": ("deepseek_v3", fenced),
    "deepseek v3.1": ("deepseek_v3", bare),
    "pythonic": ("pythonic", as_python),
    "qwen 3 coder": ("qwen3_coder", as_markup),
    "llama 4": ("pythonic", lambda calls: f"<|python_start|>{as_python(calls)}<|python_end|>"),
}  # fmt: skip

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["city", "n", "unit"])
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(KEYS, VALUES, max_size=3)), min_size=1, max_size=3)


@pytest.mark.parametrize("writer", WRITERS)
@given(calls=CALLS)
@example(calls=[("f", {"city": "a \"</tool_call>\\ '[{"})])
def test_well_formed_calls_are_read_as_they_were_written(writer, calls):
    form, write = WRITERS[writer]
    assert read(form, write(calls)) == ("", calls)


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|python_tag|>", "<think>", "</think>",
        "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
        "function", "```json\n", "\n```", '{"name": "f", "arguments": ', '{"arguments": {"a": [1]}, "name": "f"}', '{"name": ',
        '"f"', '"g"', "{}", '{"a": 1.5e3}', '"\\u00e9"', "[", "]", "{", "}", ",", ";", ":", " ", "\n", "f(a=1)", "[f(a='x')]",
        "<function=f>", "<parameter=a>", "\n</parameter>", "</function>",
        "f", "-0", "01", "true", "nul", '"', "\\", "<", "</", "<|", "hello", "<|im_end|>", "<|python_start|>", "<|python_end|>",
    ]
)  # fmt: skip
TEXTS = st.lists(FRAGMENTS | st.text(max_size=3), max_size=12).map("".join) | st.builds(
    lambda writer, calls, before, after: before + WRITERS[writer][1](calls) + after,
    st.sampled_from(list(WRITERS)),
    CALLS,
    FRAGMENTS,
    FRAGMENTS,
)
LATE = ('{"a": [1]}',)
"""The arguments that some texts name before the tool. They are told after what follows them."""
CUTS = st.lists(st.integers(0, 300), max_size=12)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def whole_parser(form: str, opened: bool) -> OutputParser:
    return OutputParser(ReasoningParser(opened=opened), CALL_FORMS[form].machine(NAMES))


@pytest.mark.parametrize("form", CALL_FORMS)
@given(text=TEXTS, cuts=CUTS, opened=st.booleans())
def test_how_a_text_is_cut_changes_no_event(form, text, cuts, opened):
    whole = parsed(whole_parser(form, opened), [text])
    assert parsed(whole_parser(form, opened), pieces_of(text, cuts)) == whole
    assert parsed(whole_parser(form, opened), list(text)) == whole


@pytest.mark.parametrize("form", CALL_FORMS)
@given(text=TEXTS)
def test_a_text_without_a_whole_call_stays_as_it_is(form, text):
    events = parsed(parser_of(form), [text])
    content, calls = totals(events)
    if not calls:
        assert content == text
    for event, following in itertools.pairwise(events):
        assert not isinstance(event, CallBegin) or isinstance(following, CallArguments)


@pytest.mark.parametrize("form", CALL_FORMS)
@given(text=TEXTS)
def test_nothing_is_lost_and_nothing_is_told_twice(form, text):
    """What is told stands in the text in this order, without overlap. Only the form itself is left out."""
    if form in ("pythonic", "qwen3_coder"):
        return  # their arguments are written anew as JSON
    place = 0
    for event in parsed(CALL_FORMS[form].machine(NAMES), [text]):
        if isinstance(event, Content) or (isinstance(event, CallArguments) and event.text not in LATE):
            place = text.find(event.text, place) + len(event.text)
            assert place >= len(event.text), event


MALFORMED = {
    "a function that is no tool": ("qwen3_coder", "<tool_call>\n<function=g>\n</function>\n</tool_call>"),
    "no function": ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    "a name that is no tool": ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>'),
    "no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
    "arguments that are a text": ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
    "no JSON": ("hermes", "<tool_call>f()</tool_call>"),
    "a line end in a name": ("hermes", '<tool_call>{"name": "f\n", "arguments": {}}</tool_call>'),
    "the end in the name": ("hermes", '  <tool_call>\n{"name": "'),
    "the end in the mark": ("mistral", "Well [TOOL_CA"),
    "an empty list": ("mistral", "[TOOL_CALLS][]"),
    "JSON that is no call": ("llama3_json", '{"answer": [1, {"b": null}]}'),
    "a call after words": ("llama3_json", 'See: {"name": "f", "parameters": {}}'),
    "a list that is no call": ("pythonic", "[1, 2, 3]"),
    "an argument without name": ("pythonic", "[f(1)]"),
    "an expression": ("pythonic", "[f(a=1 + g())]"),
    "an infinite number": ("pythonic", "[f(a=1e999)]"),
    "two equal names": ("pythonic", "[f(a=1, a=2)]"),
    "half a surrogate pair": ("pythonic", r"[f(a='\ud800')]"),
    "other marks": ("deepseek_v3", "<｜tool▁calls▁begin｜>f<｜tool▁call▁end｜>"),
    "nothing after the mark": ("granite", "<|tool_call|>"),
    "deep nesting": ("hermes", '<tool_call>{"x": ' + "[" * 70 + "]" * 70 + "}</tool_call>"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_call_is_content_character_by_character(name):
    form, text = MALFORMED[name]
    assert read(form, text) == (text, [])


def test_arguments_are_told_while_they_come():
    parser = parser_of("hermes")
    assert parser.push('Sure.\n<tool_call>{"name": "f", "arguments": ') == [Content("Sure.")]
    assert parser.push('{"ci') == [CallBegin("f"), CallArguments('{"ci')]
    assert parser.push('ty": "Par') == [CallArguments('ty": "Par')]
    assert parser.push('is"}}\n</tool_call>') == [CallArguments('is"}'), CallEnd()]
    assert parser.flush() == []


def test_a_call_that_breaks_off_ends_where_it_stops_being_json():
    events = parsed(parser_of("hermes"), ['<tool_call>{"name": "f", "arguments": {"a": oops} bye'])
    assert events == [CallBegin("f"), CallArguments('{"a": '), CallEnd(), Content("oops} bye")]
    assert parsed(parser_of("hermes"), ['<tool_call>{"name": "f", "arguments": {"a": 1']) == [
        CallBegin("f"), CallArguments('{"a": 1'), CallEnd(),
    ]  # fmt: skip


def test_blanks_beside_calls_belong_to_them_and_others_to_the_content():
    one = '<tool_call>{"name":"f","arguments":{}}</tool_call>'
    two = one.replace("{}", '{"n":1}')
    text = f" First,  \n\n{one} \n{two}\n then. \n"
    assert read("hermes", text) == (" First,then. \n", [("f", {}), ("f", {"n": 1})])


def test_names_may_come_last_and_further_members_are_part_of_the_form():
    text = '[TOOL_CALLS][{"id": "a1", "arguments": {"n": [1, 2]}, "name": "f"}, {"name": "a.b", "arguments": {}, "id": "b2"}]'
    assert read("mistral", text) == ("", [("f", {"n": [1, 2]}), ("a.b", {})])


@pytest.mark.parametrize("writer", WRITERS)
def test_at_most_one_call_is_read_if_no_more_are_allowed(writer):
    form, write = WRITERS[writer]
    one, two = [("f", {"n": 1})], [("f", {"n": 1}), ("get_weather", {})]
    assert read(form, write(one), most=1) == ("", one)
    assert read(form, f"{write(two)}", most=1) == ("", one)


def test_an_answer_that_quotes_a_call_is_no_call_where_a_grammar_keeps_them_apart():
    text = '{"note": "[TOOL_CALLS]f{}"}'
    for pieces in ([text], list(text)):
        machine = CALL_FORMS["mistral"].machine(NAMES, unmixed=True)
        assert totals(parsed(OutputParser(None, machine), pieces)) == (text, [])
    called = WRITERS["mistral, names"][1]([("f", {}), ("f", {})])
    assert totals(parsed(CALL_FORMS["mistral"].machine(NAMES, unmixed=True), [f" {called}"])) == (" ", [("f", "{}")] * 2)
    answer = CALL_FORMS["llama3_json"].machine(NAMES, unmixed=True)
    assert answer.push('{"answer": [') == [Content('{"answer": [')], "it need not wait for the end of the object"


@given(text=st.text(max_size=20), cuts=CUTS)
def test_a_named_call_is_the_whole_output(text, cuts):
    events = parsed(NamedCall("f"), pieces_of(text, cuts))
    assert events == ([CallBegin("f"), CallArguments(text), CallEnd()] if text else [])


TYPED = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "days": {"type": "integer"},
        "part": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "on": {"type": "boolean"},
        "place": {"$ref": "#/$defs/place"},
        "mood": {"enum": ["good", "1"]},
        "note": {"type": ["string", "null"]},
        "any": {},
    },
    "$defs": {"place": {"type": "object"}},
}
VALUES_READ = {
    ("text", "1"): "1", ("text", "null"): "null", ("text", '{"a": 1}'): '{"a": 1}', ("text", " a\n</para \n"): " a\n</para \n",
    ("text", ""): "", ("days", "2"): 2, ("days", "two"): "two", ("days", "02"): "02", ("part", "0.5"): 0.5,
    ("part", "None"): None,
    ("on", "True"): True, ("on", "yes"): "yes", ("place", '{"city": "Oslo"}'): {"city": "Oslo"}, ("place", "[1]"): "[1]",
    ("mood", "1"): "1", ("note", "null"): None, ("note", "[1]"): "[1]", ("any", "[1, 2]"): [1, 2], ("any", "x"): "x",
    ("any", "3"): 3,
    ("other", "true"): True, ("place", "[" * 99 + "]" * 99): "[" * 99 + "]" * 99,
}  # fmt: skip


def coder(key: str, value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def coder_parser() -> OutputParser:
    return OutputParser(None, CALL_FORMS["qwen3_coder"].machine(NAMES, parameters={"f": json.dumps(TYPED)}))


def test_a_value_of_qwen3_coder_has_the_type_of_the_tools_schema():
    for (key, value), wanted in VALUES_READ.items():
        content, ((_, arguments),) = totals(parsed(coder_parser(), list(coder(key, value))))
        assert (content, json.loads(arguments)) == ("", {key: wanted})


@given(
    value=st.lists(st.sampled_from(["\n", "<", "</parameter", ">", '"', "\\", "é", "a"]), max_size=9).map("".join), cuts=CUTS
)
def test_a_text_of_qwen3_coder_is_told_as_it_comes_and_as_it_is(value, cuts):
    if "</parameter>" in value:
        return
    text = coder("text", value)
    whole = parsed(coder_parser(), [text])
    assert totals(whole) == ("", [("f", json.dumps({"text": value}, ensure_ascii=False))])
    assert parsed(coder_parser(), pieces_of(text, cuts)) == whole
    parser = coder_parser()
    early = [event for char in text[: text.index("</func")] for event in parser.push(char)]
    told = "".join(event.text for event in early if isinstance(event, CallArguments))
    assert told == json.dumps({"text": value}, ensure_ascii=False)[:-1]


@given(calls=CALLS, cuts=CUTS)
def test_required_calls_are_a_list_of_objects(calls, cuts):
    text = json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])
    content, told = totals(parsed(RequiredCalls(NAMES), pieces_of(text, cuts)))
    assert (content, [(name, json.loads(arguments)) for name, arguments in told]) == ("", calls)


REASONED = {
    "tags": (False, "<think>\nHm, 1 < 2.\n</think>\n\nYes.", "Hm, 1 < 2.", "Yes."),
    "blanks before": (False, "\n<think>Hm</think>Yes ", "Hm", "Yes "),
    "the prompt has the first tag": (True, "Hm </thin </think> Yes", "Hm </thin", "Yes"),
    "nothing was thought": (False, "<think>\n\n</think>\n\nYes", "", "Yes"),
    "no tags": (False, " Yes </think> no", "", " Yes </think> no"),
    "a tag in the middle": (False, "Yes <think>no</think>", "", "Yes <think>no</think>"),
    "the end comes first": (True, "Hm \n</thi", "Hm \n</thi", ""),
    "half a tag": (False, " <thi", "", " <thi"),
    "only the first tag": (False, "<think> ", "", ""),
}


@pytest.mark.parametrize("name", REASONED)
def test_reasoning_is_what_stands_between_the_tags(name):
    opened, text, reasoning, content = REASONED[name]
    for pieces in ([text], list(text)):
        events = parsed(OutputParser(ReasoningParser(opened=opened), None), pieces)
        assert "".join(e.text for e in events if isinstance(e, Reasoning)) == reasoning
        assert "".join(e.text for e in events if isinstance(e, Content)) == content


def test_calls_are_read_after_reasoning_and_not_in_it():
    text = (
        '<think><tool_call>{"name":"f","arguments":{}}</tool_call></think>\n<tool_call>{"name":"f","arguments":{}}</tool_call>'
    )
    events = parsed(whole_parser("hermes", False), [text])
    assert events == [
        Reasoning('<tool_call>{"name":"f","arguments":{}}</tool_call>'), CallBegin("f"), CallArguments("{}"), CallEnd(),
    ]  # fmt: skip


def test_a_template_tells_its_form():
    for name, form in CALL_FORMS.items():
        assert [call_form("auto", f"... {sign} ...") for sign in form.signs] == [name] * len(form.signs)
    assert [call_form("auto", None), call_form("auto", "plain"), call_form("none", "<tool_call>")] == ["", "", ""]
    assert call_form("pythonic", "<tool_call>") == "pythonic"
    assert reasoning_form("auto", "{{ enable_thinking }} <think>") == "qwen3"
    assert reasoning_form("auto", "<think>") == "deepseek_r1"
    assert [reasoning_form("auto", "enable_thinking"), reasoning_form("none", "<think>")] == ["", ""]
