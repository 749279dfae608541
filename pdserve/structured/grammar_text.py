"""The translation of a constraint into the text that the library compiles. Pure."""

from __future__ import annotations

import json
from typing import Any, Final

import llguidance

from pdserve.core.errors import InvalidRequest
from pdserve.core.structured.constraint import FIELD, Constraint, ConstraintKind
from pdserve.core.structured.schemas import simplify

WHITESPACE: Final = r"[\x20\x0A\x0D\x09]{1,64}"
"""The longest run of whitespace in JSON. A model that writes nothing else would otherwise use up max_tokens."""
OPTIONS_KEY: Final = "x-guidance"
"""The library reads options in this key of a schema. Some of them make it ignore keywords, so clients may not set it."""


def grammar_text(constraint: Constraint) -> str:
    """Return the text to compile. Raises `InvalidRequest` for a schema that is no JSON, or no object."""
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _grammar("json_schema", {"type": "object", OPTIONS_KEY: {"whitespace_pattern": WHITESPACE}})
        case ConstraintKind.JSON_SCHEMA:
            return _grammar("json_schema", _schema(constraint.text))
        case ConstraintKind.REGEX:
            return str(llguidance.LLMatcher.grammar_from_regex(constraint.text))
        case ConstraintKind.CHOICE:
            return _grammar("lark_grammar", "start: " + " | ".join(map(_literal, constraint.choices)))
        case ConstraintKind.LARK:
            return _grammar("lark_grammar", constraint.text)


def answer_rule(constraint: Constraint) -> str:
    """Return the constraint as the body of a rule, for a grammar in which the constrained text is one alternative. Raises
    `InvalidRequest` as `grammar_text` does."""
    (grammar,) = json.loads(grammar_text(constraint))["grammars"]
    if grammar.get("json_schema") is not None:
        return f"%json {json.dumps(grammar['json_schema'], ensure_ascii=False)}"
    return f"%lark {{\n{grammar['lark_grammar']}\n}}"


def _grammar(language: str, value: Any) -> str:
    try:
        return json.dumps({"grammars": [{language: value}]}, ensure_ascii=False)
    except RecursionError as exc:  # reading it took fewer levels of the interpreter's stack than writing it does
        raise InvalidRequest("is nested too deeply", field=f"{FIELD}.{ConstraintKind.JSON_SCHEMA.value}") from exc


def _literal(text: str) -> str:
    """Write a text as a literal of Lark, whose escapes are those of JSON. Unlike JSON, it has no control character DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _schema(text: str) -> dict[str, Any]:
    """Read a schema. The order of its properties is kept, because the output has the same order."""
    field = f"{FIELD}.{ConstraintKind.JSON_SCHEMA.value}"
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except ValueError as exc:
        raise InvalidRequest(f"is not valid JSON: {exc}", field=field) from exc
    except RecursionError as exc:
        raise InvalidRequest("is nested too deeply", field=field) from exc
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest("must be a JSON schema, which is an object", field=field)
    if OPTIONS_KEY in schema:
        raise InvalidRequest(f"the key {OPTIONS_KEY!r} is not supported", field=field)
    simplify(schema)
    return {**schema, OPTIONS_KEY: {"whitespace_pattern": WHITESPACE}}


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")
