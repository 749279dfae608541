"""Grammars and masks without a model: what may be written is valid, and a state depends on the tokens alone."""

from __future__ import annotations

import json
import random
import re
from functools import cache

import jsonschema
import llguidance
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vocabularies import tokenizer_of, vocabulary_of

from pdserve.core.errors import InvalidRequest
from pdserve.core.structured.constraint import MAX_CHOICES, MAX_GRAMMAR_BYTES, Constraint, ConstraintKind
from pdserve.core.structured.schemas import FORMATS
from pdserve.structured import compiler as compiler_module
from pdserve.structured.compiler import Compiler
from pdserve.structured.state import ConstraintState
from testkit.random_schemas import allowed_ids, random_schema, walk

K = ConstraintKind


@cache
def compiler_of(model: str) -> Compiler:
    return Compiler(vocabulary_of(model))


def schema(**keywords: object) -> Constraint:
    return Constraint(K.JSON_SCHEMA, json.dumps(keywords))


@settings(max_examples=100)
@given(rng=st.randoms(use_true_random=False), model=st.sampled_from(["tiny", "default"]))
def test_whatever_is_written_to_the_end_is_valid(rng: random.Random, model: str) -> None:
    wanted = random_schema(rng)
    state = compiler_of(model).start(schema(**wanted))
    output, ended = walk(state, vocabulary_of(model).eos_token_ids, rng)
    if ended:
        text = tokenizer_of(model).decode(output)
        jsonschema.validate(json.loads(text), wanted)


@settings(max_examples=100)
@given(rng=st.randoms(use_true_random=False), model=st.sampled_from(["tiny", "default"]))
def test_a_state_made_from_the_tokens_has_the_same_masks(rng: random.Random, model: str) -> None:
    """One state computes each mask on its way, another one computes the last alone, as after a handoff. A third one has a
    grammar of its own, whose lexer has seen nothing."""
    constraint = schema(**random_schema(rng))
    state = compiler_of(model).start(constraint)
    output, _ = walk(state, vocabulary_of(model).eos_token_ids, rng, most=60)
    cuts = sorted(rng.sample(range(len(output)), min(3, len(output))))
    for cut in cuts:
        prompt = [1, 2, 3]
        states = [compiler_of(model).start(constraint), Compiler(vocabulary_of(model)).start(constraint)]
        for other in states:
            other.catch_up([*prompt, *output[:cut]], len(prompt))
        on_its_way = compiler_of(model).start(constraint)
        for token_id in output[:cut]:
            on_its_way.mask()
            on_its_way.accept(token_id)
        assert on_its_way.mask() == states[0].mask() == states[1].mask()
        assert on_its_way.is_accepting == states[0].is_accepting


def test_each_kind_of_constraint_is_enforced(compiler, vocabulary, tokenizer):
    rng = random.Random(5)
    cases = {
        Constraint(K.REGEX, "[a-z]{2,6}=[0-9]{1,3}"): lambda text: re.fullmatch("[a-z]{2,6}=[0-9]{1,3}", text),
        Constraint(K.CHOICE, choices=("yes", 'say "no"\n', "\\", "ja—nein", "yes please", "\x7f")): (
            lambda text: text in ("yes", 'say "no"\n', "\\", "ja—nein", "yes please", "\x7f")
        ),
        Constraint(K.LARK, 'start: "(" start ")" | "x"'): lambda text: (
            re.fullmatch(r"\(*x\)*", text) and text.count("(") * 2 + 1 == len(text)
        ),
    }
    for constraint, is_valid in cases.items():
        for _ in range(10):
            output, ended = walk(compiler.start(constraint), vocabulary.eos_token_ids, rng, most=3000)
            assert ended
            assert is_valid(tokenizer.decode(output)), tokenizer.decode(output)
    state = compiler.start(Constraint(K.JSON_OBJECT))
    state.catch_up(tokenizer.encode('{"any": [1, "x", {}]}', add_special_tokens=False), 0)
    assert state.failure is None
    assert state.is_accepting


def test_the_end_of_the_output_is_allowed_exactly_where_the_grammar_accepts(compiler, vocabulary, tokenizer):
    state = compiler.start(Constraint(K.REGEX, "ab+"))
    eos = set(vocabulary.eos_token_ids)
    assert eos
    for token_id, accepting in zip(tokenizer.encode("abb", add_special_tokens=False), (False, True, True), strict=False):
        assert bool(eos & set(allowed_ids(state.mask()))) == state.is_accepting
        assert state.accept(token_id)
        assert accepting is state.is_accepting or len(tokenizer.encode("abb", add_special_tokens=False)) < 3
    assert eos <= set(allowed_ids(state.mask()))
    assert not state.ended
    assert state.accept(min(eos))
    assert state.ended


def test_a_grammar_that_can_go_nowhere_has_ended(compiler, vocabulary, tokenizer):
    state = compiler.start(Constraint(K.CHOICE, choices=("stop",)))
    state.catch_up(tokenizer.encode("stop", add_special_tokens=False), 0)
    assert state.ended
    assert state.is_accepting
    assert set(allowed_ids(state.mask())) == set(vocabulary.eos_token_ids)


def test_a_token_that_is_not_allowed_fails_the_state_for_good(compiler, tokenizer):
    state = compiler.start(Constraint(K.CHOICE, choices=("yes",)))
    wrong = tokenizer.encode("no", add_special_tokens=False)
    assert not state.accept(wrong[0])
    assert state.failure is not None
    assert "not allowed" in state.failure
    assert (state.mask(), state.ended, state.is_accepting) == (None, False, False)
    assert not state.accept(tokenizer.encode("yes", add_special_tokens=False)[0])


def test_no_id_without_a_token_is_ever_allowed():
    """A model's vocabulary may be larger than its tokenizer's. Special tokens add nothing to a text."""
    from pdserve.structured.vocabulary import Vocabulary

    tokenizer = tokenizer_of("default")
    padded = Vocabulary(tokenizer, tokenizer.vocab_size + 77, (2,))
    state = Compiler(padded).start(Constraint(K.REGEX, "(.|\n)*"))
    ids = allowed_ids(state.mask())
    assert max(ids) < tokenizer.vocab_size
    assert [i for i in ids if not tokenizer.token_bytes(i)] == [2]
    assert len(ids) > 40_000


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "null"}}, "contains"),
        ({"type": "string", "not": {"const": "x"}}, "not"),
        ({"if": {"type": "string"}, "then": {"minLength": 2}}, "if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "format": 3}, "format"),
        ({"type": "string", "pattern": "(?=x)y"}, "look"),
        ({"type": "string", "pattern": "^(?!^[a]*$)b|a"}, "look"),
        ({"type": "string", "pattern": "^(?!^[^a]*$)b"}, "look"),
        ({"$ref": "https://example.com/schema.json"}, "example.com"),
        ({"type": "object", "x-guidance": {"lenient": True}}, "x-guidance"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(compiler, keywords, named):
    with pytest.raises(InvalidRequest) as caught:
        compiler.start(schema(**keywords))
    assert caught.value.field == "structured_outputs.json"
    assert named in caught.value.message
    assert "\n" not in caught.value.message


def takes(compiler: Compiler, text: str, **keywords: object) -> bool:
    state = compiler.start(schema(**keywords))
    tokenizer = tokenizer_of("tiny")
    return all(state.accept(one) for one in tokenizer.encode(text, add_special_tokens=False)) and state.is_accepting


def test_a_format_that_the_compiler_does_not_know_forbids_nothing_and_a_known_one_is_enforced():
    """`path` and `password`, which pydantic writes, were refused. The list of known ones is that of the library."""
    compiler = compiler_of("tiny")
    for name in sorted(FORMATS):
        text = json.dumps({"grammars": [{"json_schema": {"type": "string", "format": name}}]})
        matcher = llguidance.LLMatcher(vocabulary_of("tiny").tokens, text, log_level=0)
        assert not matcher.is_error()
        assert takes(compiler, '"no form at all"', type="string", format=name) == (name == "unknown")
    for name in ("path", "password", "json-string", "int64", "regex", "uri-reference", "iri", "binary"):
        assert takes(compiler, '"no form at all"', type="string", format=name)
    assert takes(compiler, '["no form"]', type="array", items=[{"type": "string", "format": "path"}])
    inner = {"anyOf": [{"type": "integer", "format": "int32"}, {"$ref": "#/$defs/file"}]}
    wanted = {"type": "array", "items": inner, "$defs": {"file": {"type": "string", "format": "path", "minLength": 2}}}
    assert takes(compiler, '[7, "ab"]', **wanted)
    assert not takes(compiler, '[7, "a"]', **wanted)


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
"""What pydantic 2.10 to 2.13 write for a `Decimal`."""


@given(st.text(st.sampled_from("-+.019"), max_size=6))
@example("")
@example("+.")
@example("-0.10")
def test_a_look_ahead_for_any_other_character_is_enforced_without_one(number: str):
    taken = takes(compiler_of("tiny"), json.dumps(number), type="string", pattern=DECIMAL)
    assert taken == (re.search(DECIMAL, number) is not None)


@pytest.mark.parametrize(
    ("kind", "text", "choices", "named"),
    [
        (K.REGEX, "", (), "must hold a text"),
        (K.JSON_OBJECT, "{}", (), "takes no text"),
        (K.CHOICE, "", (), "choice"),
        (K.CHOICE, "", ("a", ""), "empty"),
        (K.REGEX, "a", ("b",), "choice"),
        (K.REGEX, "a" * (MAX_GRAMMAR_BYTES + 1), (), str(MAX_GRAMMAR_BYTES)),
        (K.CHOICE, "", ("a",) * (MAX_CHOICES + 1), str(MAX_CHOICES)),
        (K.REGEX, "\ud800", (), "Unicode"),
    ],
)
def test_a_constraint_has_the_fields_of_its_kind_within_limits(kind, text, choices, named):
    with pytest.raises(InvalidRequest, match=f"structured_outputs.{kind.value}.*{named}"):
        Constraint(kind, text, choices)


@pytest.mark.parametrize("text", ["{", "[1]", "7", '{"minimum": NaN}', "false", '{"a":' * 3000])
def test_a_text_that_is_no_schema_is_refused(compiler, text):
    with pytest.raises(InvalidRequest, match=r"structured_outputs\.json"):
        compiler.start(Constraint(K.JSON_SCHEMA, text))


def test_the_last_grammars_are_kept_and_no_more(vocabulary):
    compiler = Compiler(vocabulary, capacity=3)
    first = Constraint(K.REGEX, "a0")
    for i in range(5):
        compiler.start(Constraint(K.REGEX, f"a{i}"))
        compiler.start(first)
    assert len(compiler) == 3
    before = compiler._grammars[first]
    compiler.start(first)
    assert compiler._grammars[first] is before


def test_a_grammar_whose_state_failed_is_compiled_anew(compiler, tokenizer):
    constraint = Constraint(K.CHOICE, choices=("yes",))
    state = compiler.start(constraint)
    assert len(compiler) == 1
    state.accept(tokenizer.encode("no", add_special_tokens=False)[0])
    assert len(compiler) == 0
    assert isinstance(compiler.start(constraint), ConstraintState)


@pytest.mark.parametrize(
    ("limit", "constraint"),
    [
        ({"max_lexer_states": 15}, Constraint(K.REGEX, "(a|b)*a(a|b){12}c")),
        ({"step_max_items": 30}, Constraint(K.LARK, 'start: s\ns: s s | "a" | "b"')),
    ],
)
def test_a_mask_that_needs_too_much_work_fails_the_state(monkeypatch, limit, constraint):
    """The library then gives a mask that would end the output as if it were whole."""
    monkeypatch.setattr(compiler_module, "LIMITS", llguidance.LLParserLimits(verbose_errors=False, **limit))
    compiler = Compiler(vocabulary_of("tiny"))
    state = compiler.start(constraint)
    (letter,) = tokenizer_of("tiny").encode("a", add_special_tokens=False)
    for _ in range(40):
        if state.mask() is None:
            break
        assert state.accept(letter)
    assert state.failure is not None
    assert "too much work" in state.failure
    assert "\n" not in state.failure
    assert (state.mask(), state.ended, state.is_accepting, len(compiler)) == (None, False, False, 0)


@settings(max_examples=60)
@given(rng=st.randoms(use_true_random=False), model=st.sampled_from(["tiny", "default"]))
def test_a_place_ahead_is_that_of_the_tokens_and_leaves_the_state_where_it_is(rng: random.Random, model: str) -> None:
    """Along a draft that goes wrong somewhere. Each place has the mask of a state that took the tokens, whoever asks first."""
    constraint = schema(**random_schema(rng))
    output, _ = walk(compiler_of(model).start(constraint), vocabulary_of(model).eos_token_ids, rng, most=40)
    state, known = compiler_of(model).start(constraint), rng.randrange(len(output))
    state.catch_up(output[:known], 0)
    wrong = rng.randrange(vocabulary_of(model).size)
    places, place = [], state
    for token_id in (*output[known : known + 5], wrong):
        allowed = token_id in allowed_ids(place.mask() or b"")
        further = place.after(token_id)
        assert (further is not None) == allowed
        if further is None:
            break
        places.append(place := further)
    for length, place in reversed(list(enumerate(places[:5], known + 1))):
        if length > len(output):
            continue
        alone = compiler_of(model).start(constraint)
        alone.catch_up(output[:length], 0)
        assert (place.ended, place.mask()) == (alone.ended, alone.mask())
    assert state.accepted == known
    state.catch_up(output, 0)
    assert state.failure is None


def test_forced_text_is_told_as_tokens_and_takes_nothing(compiler, tokenizer):
    """Text after which a token might go on in several ways is not forced."""
    state = compiler.start(Constraint(K.REGEX, "the (harbour light|house)"))
    forced = state.forced()
    assert forced
    assert "the ".startswith(tokenizer.decode(list(forced)))
    assert (state.accepted, state.forced()) == (0, forced)
    state.catch_up(tokens := tokenizer.encode("the harb", add_special_tokens=False), 0)
    rest = tokenizer.decode([*tokens, *state.forced()])
    assert len(rest) > len("the harb")
    assert "the harbour light".startswith(rest)
    free = compiler.start(Constraint(K.REGEX, "[a-z]+"))
    assert free.forced() == ()


def test_a_place_ahead_that_fails_changes_nothing(monkeypatch):
    """A mask ahead that needs too much work is that of a draft, which may be wrong."""
    limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=15)
    monkeypatch.setattr(compiler_module, "LIMITS", limits)
    compiler = Compiler(vocabulary_of("tiny"))
    state = compiler.start(Constraint(K.REGEX, "(a|b)*a(a|b){12}c"))
    (letter,) = tokenizer_of("tiny").encode("a", add_special_tokens=False)
    place: ConstraintState | None = state
    while place is not None and place.mask() is not None:
        place = place.after(letter)
    assert place is None or place.failure is not None
    assert state.failure is None
    assert len(compiler) == 1, "the grammar stays with those that are compiled"
    assert state.mask() is not None
