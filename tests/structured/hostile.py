"""Grammars that are made to cost much, and those that are as large as they may be."""

from __future__ import annotations

import json

from pdserve.core.structured.constraint import MAX_CHOICES, MAX_GRAMMAR_BYTES, Constraint, ConstraintKind

K = ConstraintKind
HOSTILE = {
    "a regular expression with 10^9 states": Constraint(K.REGEX, "((a{1,1000}){1,1000}){1,1000}"),
    "an automaton of 2^300 states": Constraint(K.REGEX, "(a|b)*a(a|b){300}(a|b)*a(a|b){299}c"),
    "a regular expression nested 30,000 times": Constraint(K.REGEX, "(" * 30_000 + "a" + ")" * 30_000),
    "a grammar nested 30,000 times": Constraint(K.LARK, "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "a schema nested 6,000 times": Constraint(K.JSON_SCHEMA, '{"items":' * 6_000 + "{}" + "}" * 6_000),
    "an intersection of many cases": Constraint(
        K.JSON_SCHEMA,
        json.dumps({"allOf": [{"anyOf": [{"pattern": f"{i}.*{j}"} for j in range(9)]} for i in range(12)], "type": "string"}),
    ),
    "a reference to itself": Constraint(K.JSON_SCHEMA, '{"$ref": "#"}'),
    "sixty kilobytes of alternatives": Constraint(
        K.LARK, "start: " + " | ".join(f'"{i:04x}" start "{i:04x}"' for i in range(2800))
    ),
}
"""Each is refused, or small enough after all."""


def _largest_schema() -> str:
    """A schema of as many properties as its bytes allow."""
    fields: dict[str, object] = {}
    for i in range(10_000):
        more = {**fields, f"field_{i}": {"type": "integer"}} if i % 100 == 0 else fields
        if i % 100 == 0 and len(json.dumps({"properties": more}).encode()) > MAX_GRAMMAR_BYTES - 4000:
            break
        fields[f"field_{i}"] = {"type": "integer"}
    return json.dumps({"type": "object", "properties": fields, "required": list(fields)[:10], "additionalProperties": False})


def _padded(start: str, piece: str, end: str = "") -> str:
    return start + piece * ((MAX_GRAMMAR_BYTES - len(start) - len(end)) // len(piece)) + end


LARGEST = {
    f"{MAX_CHOICES:,} choices": Constraint(K.CHOICE, choices=tuple(f"choice number {i}" for i in range(MAX_CHOICES))),
    "choices of all bytes": Constraint(K.CHOICE, choices=tuple(f"{i:064d}" for i in range(MAX_GRAMMAR_BYTES // 64))),
    "a literal of all bytes": Constraint(K.REGEX, "a" * MAX_GRAMMAR_BYTES),
    "a class for each three bytes": Constraint(K.REGEX, _padded("", "[a-f]")),
    "optional letters": Constraint(K.REGEX, _padded("", "a?")),
    "stars": Constraint(K.REGEX, _padded("", "(ab|a)*")),
    "rules": Constraint(K.LARK, "start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(2400)) + '\nr2400: "c"'),
    "an object of many properties": Constraint(K.JSON_SCHEMA, _largest_schema()),
    "an enumeration": Constraint(K.JSON_SCHEMA, json.dumps({"enum": [f"value {i}" for i in range(4000)]})),
}
"""Each has nearly the most bytes or parts that a constraint may have."""
