"""The Lark grammars of outputs whose calls are valid: one rule for what stands behind the mark of each form. Pure.

A grammar says which texts a model may write, and the form's parser reads them back. Marks that are special tokens stand in it
by their ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdserve.text.calls.forced import object_schema
from pdserve.text.calls.machine import BLANKS

_BLANK: Final = r"[ \t\n\r]"
assert _BLANK.encode().decode("unicode_escape") == f"[{BLANKS}]"
_COMMA: Final = '","'
_LITERALS: Final = {
    "value": 'STRING | NUMBER | "None" | "True" | "False" | values | members',
    "values": '"[" blanks (value (blanks "," blanks value)* blanks)? "]"',
    "members": '"{" blanks (member (blanks "," blanks member)* blanks)? "}"',
    "member": 'STRING blanks ":" blanks value',
    "STRING": r"""/'([^'\\\x00-\x1f]|\\[\\'"nrt])*'|"([^"\\\x00-\x1f]|\\[\\'"nrt])*"/""",
    "NUMBER": r"/-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?([eE][+-]?[0-9]{1,2})?/",
}
"""The literals of Python that a call of the form `pythonic` may have. Longer numbers would not all be finite."""


@dataclass(frozen=True, slots=True)
class CallBlock:
    """The rules of what a form writes."""

    marked: str
    """What stands behind the mark."""
    unmarked: str = ""
    """What stands without the mark where the output begins. Empty: nothing does."""


class CallRules:
    """The rules of one request's calls, from which a form makes its grammar."""

    def __init__(
        self,
        parameters: Mapping[str, str | None],
        special: Mapping[str, int],
        options: Mapping[str, Any],
        *,
        single: bool,
    ) -> None:
        """`parameters` has the schema of each tool by its name; None: its arguments may be any object. `special` has the ids of
        marks that are special tokens. `options` are those of the compiler of schemas. `single`: there is at most one call."""
        self.single = single
        self.names = tuple(parameters)
        self._special = special
        self._rules = {"blanks": r"/[ \n]{0,4}/"}
        for index, text in enumerate(parameters.values()):
            schema = {"type": "object"} if text is None else object_schema(text)
            self._rules[f"arguments{index}"] = f"%json {json.dumps({**schema, **options})}"

    def word(self, text: str) -> str:
        """Return the text, or the special token that it is."""
        return f"<[{self._special[text]}]>" if text in self._special else json.dumps(text)

    def rule(self, name: str, body: str) -> str:
        """Add a rule, and return its name."""
        self._rules[name] = body
        return name

    def each(self, write: Callable[[str, str], str]) -> str:
        """Return what `write` makes of the name of any one tool and of the rule of its arguments."""
        return "(" + " | ".join(write(name, f"arguments{index}") for index, name in enumerate(self.names)) + ")"

    def object(self, key: str) -> str:
        """Return the rule of one call as an object with a name and arguments, which are called `key`."""
        quoted = json.dumps(f'"{key}"')
        between = f'blanks "," blanks {quoted} blanks ":" blanks'
        called = self.each(lambda name, arguments: f"{json.dumps(json.dumps(name))} {between} {arguments}")
        return self.rule("object", rf'"{{" blanks "\"name\"" blanks ":" blanks {called} blanks "}}"')

    def list(self) -> str:
        """Return the rule of a list of such objects."""
        one = self.object("arguments")
        return self.rule("calls_list", f'"[" blanks {self.several(one, _COMMA)} blanks "]"')

    def several(self, one: str, between: str) -> str:
        """Return one or more of a rule."""
        return one if self.single else f"{one} (blanks {between} blanks {one})*"

    def text(self, start: str) -> str:
        """Return the grammar as a text, beginning with the rule `start`."""
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for name, body in self._rules.items())]) + "\n"


def hermes(rules: CallRules) -> CallBlock:
    """Return the rules of the form `hermes`."""
    one, end = rules.object("arguments"), rules.word("</tool_call>")
    return CallBlock(f"blanks {one} blanks {end}")


def granite(rules: CallRules) -> CallBlock:
    """Return the rules of the form `granite`."""
    return CallBlock(f"blanks {rules.list()}")


def mistral(rules: CallRules) -> CallBlock:
    """Return the rules of the form `mistral`."""
    call_id, before = rules.word("[CALL_ID]"), rules.word("[ARGS]")
    marks = f"(({call_id} /[a-zA-Z0-9]{{1,64}}/)? {before})?"
    named = rules.each(lambda name, arguments: f"{json.dumps(name)} {marks} blanks {arguments}")
    return CallBlock(f"blanks ({rules.list()} | {named})")


def llama3_json(rules: CallRules) -> CallBlock:
    """Return the rules of the form `llama3_json`."""
    one = rules.object("parameters")
    calls = f"""blanks {rules.several(one, '";"?')}"""
    return CallBlock(calls, calls)


def deepseek_v3(rules: CallRules) -> CallBlock:
    """Return the rules of the form `deepseek_v3`."""
    words = ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    begin, between, end, last = map(rules.word, words)

    def write(name: str, arguments: str) -> str:
        fence = json.dumps(f"{name}\n```json\n")
        fenced = rf'"function" {between} {fence} {arguments} "\n```"'
        return f"{fenced} | {json.dumps(name)} {between} {arguments}"

    one = rules.rule("one", f"{begin} {rules.each(write)} {end}")
    return CallBlock(f"blanks {rules.several(one, '')} blanks {last}")


def pythonic(rules: CallRules) -> CallBlock:
    """Return the rules of the form `pythonic`. Arguments are any literals of Python."""
    for name, body in _LITERALS.items():
        rules.rule(name, body)
    rules.rule("named", '/[a-zA-Z_][a-zA-Z0-9_]*/ blanks "=" blanks value')
    called = rules.each(lambda name, _: json.dumps(f"{name}("))
    one = rules.rule("one", f'{called} blanks (named (blanks "," blanks named)* blanks)? ")"')
    calls = f'blanks "[" blanks {rules.several(one, _COMMA)} blanks "]"'
    return CallBlock(f"{calls} {rules.word('<|python_end|>')}", calls)


def qwen3_coder(rules: CallRules) -> CallBlock:
    """Return the rules of the form `qwen3_coder`. Values are any texts."""
    rules.rule("parameter", '"<parameter=" /[^<>\\n]{1,64}/ ">" value blanks')
    rules.rule("value[lazy]", r"/(?s:.*)<\/parameter>/")
    called = rules.each(lambda name, _: json.dumps(f"<function={name}>"))
    return CallBlock(f'blanks {called} blanks parameter* "</function>" blanks {rules.word("</tool_call>")}')


def grammar_of_text(rules: CallRules, block: CallBlock, mark: str, opens: str) -> str:
    """Return the grammar of any text in which each call is valid. `opens` is the character by which calls without the mark
    begin, which end the output: what follows them could be taken for further ones."""
    spelled = re.escape(mark).replace("/", r"\/")
    marked = rules.rule("marked", block.marked)
    first = "(?s:.+)"
    if opens:
        first = rf"({_BLANK}+|{_BLANK}*[^ \t\n\r{re.escape(opens)}](?s:.*))"
    rules.rule("TEXT", f"/{first}/ & ~/(?s:.*){spelled}(?s:.*)/")
    token = rules.word(mark)
    if token.startswith("<"):
        rules.rule("head", f"TEXT? {token}")
    else:
        rules.rule("head[lazy]", f"/({first})?{spelled}/")
    if opens:
        return rules.text(f"{block.unmarked} blanks | head {marked} blanks | TEXT?")
    return rules.text(f"(head {marked}){'{0,1}' if rules.single else '*'} TEXT?")


def grammar_beside_answer(rules: CallRules, block: CallBlock, mark: str, answer: str) -> str:
    """Return the grammar of an output that is calls and nothing else, or else an answer, whose rule is `answer`."""
    rules.rule("answer", answer)
    marked = rules.rule("marked", f"blanks {rules.word(mark)} {block.marked}")
    calls = marked if rules.single else f"{marked}+"
    unmarked = f"{block.unmarked} blanks | " if block.unmarked else ""
    return rules.text(f"{unmarked}{calls} blanks | answer")
