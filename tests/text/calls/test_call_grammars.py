"""The grammars of calls: each form's own way of writing is allowed, invalid calls are not, and the form's parser reads back
whatever is allowed."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import jsonschema
import pytest
import tokenizers
from test_call_parsers import WRITERS, joined, totals
from tokenizers import decoders, models, pre_tokenizers, trainers

from pdserve.core.structured.constraint import Constraint, ConstraintKind
from pdserve.structured.compiler import compile_grammar
from pdserve.structured.grammar_text import OPTIONS_KEY, WHITESPACE, answer_rule
from pdserve.structured.state import ConstraintState
from pdserve.structured.vocabulary import Vocabulary
from pdserve.text.calls.forced import schema_of_calls
from pdserve.text.calls.grammar import CallRules, grammar_beside_answer, grammar_of_text
from pdserve.text.calls.output import OutputParser
from pdserve.text.calls.registry import CALL_FORMS
from pdserve.text.tokenizer import Tokenizer

END = "</s>"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Oslo", 'a "</tool_call>', "Rome"]}},
}
TOOLS = {"get_weather": json.dumps(WEATHER), "f": ""}
CALL = [("get_weather", {"city": "Oslo"})]
CALLS = [*CALL, ("f", {})]
WRONG = [("get_weather", {"town": "Oslo"})]
ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["get_weather", "x"]}, "parameters": {"type": "boolean"}},
    "required": ["name", "parameters"],
    "additionalProperties": False,
}
ANSWERED = '{"name": "get_weather", "parameters": true}'


@cache
def model(special: bool) -> tuple[Tokenizer, Vocabulary]:
    """A small vocabulary of bytes, in which marks are special tokens or not."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = dict.fromkeys(mark for form in CALL_FORMS.values() for mark in form.marks) if special else {}
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=[END, *marks],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([json.dumps(TOOLS)], trainer)
    tokenizer = Tokenizer(backend, None)
    return tokenizer, Vocabulary(tokenizer, backend.get_vocab_size(), (0,))


def grammar(form: str, special: bool, *, single: bool = False, answer: Constraint | None = None) -> ConstraintState:
    known = CALL_FORMS[form]
    tokenizer, vocabulary = model(special)
    ids = {text: index for index, text in tokenizer.special_tokens.items() if text in known.marks}
    rules = CallRules(TOOLS, ids, {OPTIONS_KEY: {"whitespace_pattern": WHITESPACE}}, single=single)
    block, mark = known.rules(rules), known.machine.mark
    if answer is None:
        text = grammar_of_text(rules, block, mark, known.opens)
    else:
        text = grammar_beside_answer(rules, block, mark, answer_rule(answer))
    return ConstraintState(compile_grammar(vocabulary, Constraint(ConstraintKind.LARK, text)))


def allows(state: ConstraintState, text: str, special: bool) -> bool:
    state = ConstraintState(state._matcher.deep_copy())
    return all(map(state.accept, model(special)[0].encode(text, add_special_tokens=False))) and state.is_accepting


JSON = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(ANSWER))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_each_form_may_write_valid_calls_and_no_others(writer: str, special: bool) -> None:
    form, write = WRITERS[writer]
    last = bool(CALL_FORMS[form].opens)
    for single in (False, True):
        text = grammar(form, special, single=single)
        assert allows(text, write(CALL), special)
        assert allows(text, write(CALLS), special) == (not single)
        assert allows(text, write(WRONG), special) == (not CALL_FORMS[form].checks_arguments)
        assert allows(text, write(CALL) + " Bye", special) == (not last)
        assert all(allows(text, said, special) for said in ("", "Hi\n", " \n", "a{[<"))
        beside = grammar(form, special, single=single, answer=JSON)
        assert allows(beside, write(CALL), special)
        assert allows(beside, write(CALLS), special) == (not single)
        assert allows(beside, write(WRONG), special) == (not CALL_FORMS[form].checks_arguments)
        assert allows(beside, ANSWERED, special)
        for mixed in ("", "Hi", '{"name": "y"}', write(CALL) + ANSWERED, ANSWERED + write(CALL)):
            assert not allows(beside, mixed, special)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", CALL_FORMS)
def test_what_a_grammar_allows_is_read_as_calls_or_as_the_answer(form: str, special: bool) -> None:
    beside, free = grammar(form, special, answer=JSON), grammar(form, special)
    mark = CALL_FORMS[form].machine.mark
    answers = calls = 0
    for seed in range(16):
        text = walked(beside if seed % 2 else free, special, Random(seed), "" if seed % 2 else mark)
        if text is None:
            continue  # it had not ended after many tokens
        parser = OutputParser(None, CALL_FORMS[form].machine(["f", "get_weather"], unmixed=bool(seed % 2)))
        content, called = totals(joined([event for char in text for event in parser.push(char)] + parser.flush()))
        if called:
            calls += 1
            assert mark not in content
            assert not content or not seed % 2
            for name, arguments in called if CALL_FORMS[form].checks_arguments else ():
                jsonschema.validate(json.loads(arguments), json.loads(TOOLS[name] or '{"maxProperties": 0}'))
        else:
            answers += 1
            assert content == text
            jsonschema.validate(json.loads(content), ANSWER)
    assert answers
    assert calls


def walked(state: ConstraintState, special: bool, random: Random, begin: str) -> str | None:
    """Return a random text that the grammar allows, which begins with `begin`. None: it would be long."""
    tokenizer, _ = model(special)
    state = ConstraintState(state._matcher.deep_copy())
    ids = tokenizer.encode(begin, add_special_tokens=False)
    assert all(map(state.accept, ids))
    for _ in range(400):
        mask = state.mask()
        assert mask is not None
        allowed = [index for index in range(8 * len(mask)) if mask[index // 8] >> index % 8 & 1]
        if 0 in allowed and (len(allowed) == 1 or random.random() < 0.6):
            return tokenizer.decode(ids, skip_special_tokens=False)
        ids.append(random.choice([index for index in allowed if index]))
        assert state.accept(ids[-1])
    return None


@pytest.mark.parametrize(
    ("answer", "texts"),
    [
        (Constraint(ConstraintKind.CHOICE, choices=("yes", 'n"o}')), ("yes", 'n"o}')),
        (Constraint(ConstraintKind.REGEX, r"a/[}\]]{2}"), ("a/]}",)),
        (Constraint(ConstraintKind.LARK, 'start: "}" TWO // }\nTWO: /[}]/'), ("}}",)),
        (Constraint(ConstraintKind.JSON_OBJECT), ('{"a": {}}',)),
    ],
)
def test_any_constraint_may_stand_beside_calls(answer: Constraint, texts: tuple[str, ...]) -> None:
    state = grammar("hermes", special=False, answer=answer)
    write = WRITERS["hermes"][1]
    for text in (*texts, write(CALLS)):
        assert allows(state, text, special=False)
        assert not allows(state, text + "x", special=False)


@pytest.mark.parametrize("own_id", [{}, {"$id": "https://example.com/tool.json"}])
def test_required_calls_keep_what_arguments_named_like_keywords_refer_to(own_id: dict[str, str]) -> None:
    names = ("const", "default", "enum", "examples", "properties", "$ref", "$id")
    arguments = {name: {"$ref": "#/$defs/enum"} for name in names}
    parameters = {"type": "object", "properties": arguments, "$defs": {"enum": {"type": "null"}}, **own_id}
    schema = schema_of_calls({"f": json.dumps(parameters)}, None)
    state = ConstraintState(compile_grammar(model(special=False)[1], Constraint(ConstraintKind.JSON_SCHEMA, schema)))
    for value, wanted in (("null", True), ("1", False)):
        told = ", ".join(f'"{name}": {value}' for name in names)
        assert allows(state, f'[{{"name": "f", "parameters": {{{told}}}}}]', special=False) == wanted
