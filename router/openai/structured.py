"""The constraint of an OpenAI-style body: `response_format` as OpenAI names it, `structured_outputs` as vLLM does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from pdserve.core.structured.constraint import FIELD, Constraint, ConstraintKind
from pdserve.core.structured.schemas import simplify
from router.api.request import ChatPrompt, GenerateInput
from router.openai.body import Body, ResponseFormat
from router.openai.ignored import Ignored, joined, left_out
from router.openai.json import decode, refuse, show

Fields = Mapping[str, msgspec.Raw]

_TEXT: Final = msgspec.json.Decoder(str)
_TEXTS: Final = msgspec.json.Decoder(tuple[str, ...])
_TRUTH: Final = msgspec.json.Decoder(bool)
_FORMAT: Final = "response_format"
_KINDS: Final = {kind.value: kind for kind in ConstraintKind}
SCHEMA: Final = f"{FIELD}.{ConstraintKind.JSON_SCHEMA.value}"
"""The router's name of a schema."""
_NOTHING: Final = (b"null", b"false")


def read_constraint(body: Body) -> Constraint | None:
    """Return what the text of the output must be; None: any text. Raises `InvalidRequest` naming the field."""
    asked = None if body.structured_outputs is None else _structured(body.structured_outputs)
    formatted = None if body.response_format is None else _formatted(body.response_format)
    if asked is not None and formatted is not None:
        raise refuse(_FORMAT, f"is not allowed beside {FIELD}")
    return asked or formatted


def formats_left_out(request: GenerateInput, schema: str, parameters: str) -> Ignored:
    """Return the formats that nobody enforces of the schemas that are enforced. The client calls that of the output `schema`,
    and those of tools `parameters`."""
    parts = []
    if request.constraint is not None and request.constraint.kind is ConstraintKind.JSON_SCHEMA:
        parts.append(left_out(f"{schema}.format", _formats(request.constraint.text)))
    if isinstance(request.prompt, ChatPrompt):
        forced = request.tool_choice.forced
        enforced = [tool.parameters for tool in request.prompt.tools if tool.parameters and (tool.strict or forced)]
        parts += [left_out(f"{parameters}.format", _formats(text)) for text in enforced]
    return joined(parts)


def _formats(schema: str) -> list[str]:
    try:
        return simplify(msgspec.json.decode(schema))
    except (msgspec.DecodeError, RecursionError):  # the router refuses it
        return []


def _structured(fields: Fields) -> Constraint:
    """Read vLLM's field. Its options that are off ask for nothing, and options that are on are refused."""
    given = {name: bytes(raw) for name, raw in fields.items() if bytes(raw) not in _NOTHING}
    for name in given:
        if name not in _KINDS:
            raise refuse(f"{FIELD}.{show(name)[1:-1]}", "is not supported")
    if len(given) != 1:
        raise refuse(FIELD, f"must hold exactly one of {', '.join(_KINDS)}")
    ((name, text),) = given.items()
    field, kind = f"{FIELD}.{name}", _KINDS[name]
    match kind:
        case ConstraintKind.JSON_OBJECT:
            decode(text, _TRUTH, field)
            return Constraint(kind)
        case ConstraintKind.CHOICE:
            return Constraint(kind, choices=decode(text, _TEXTS, field))
        case ConstraintKind.JSON_SCHEMA:
            return Constraint(kind, decode(text, _TEXT, field) if text.startswith(b'"') else text.decode())
        case ConstraintKind.REGEX | ConstraintKind.LARK:
            return Constraint(kind, decode(text, _TEXT, field))


def _formatted(fields: ResponseFormat) -> Constraint | None:
    """Read OpenAI's field. A schema is enforced whether it is strict or not."""
    kind = fields.type
    if kind is None:
        raise refuse(_FORMAT, "must name a type: text, json_object or json_schema")
    if kind == "text":
        return None
    if kind == "json_object":
        return Constraint(ConstraintKind.JSON_OBJECT)
    if kind != "json_schema":
        raise refuse(f"{_FORMAT}.type", f"must be text, json_object or json_schema, got {show(kind)}")
    place = f"{_FORMAT}.json_schema"
    if fields.json_schema is None:
        raise refuse(place, "is missing")
    schema = bytes(fields.json_schema.schema)
    if schema == b"null":
        raise refuse(f"{place}.schema", "is missing")
    return Constraint(ConstraintKind.JSON_SCHEMA, schema.decode())
