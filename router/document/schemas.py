"""The schemas of the bodies. Types come from the structs that parse bodies, limits from the dataclasses that check values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from pdserve.core.limits import MAX_MESSAGES, IntRange, Limit, MaxBytes, MaxCount, RealRange, TextLengths, limits_of
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import Placement, SamplingParams
from router.api.request import MAX_CHOICES, SESSION_ID
from router.document.descriptions import FIELDS
from router.kserve.request import MAX_TIMEOUT_US, GenerateBody, InferBody
from router.openai.body import ChatBody, CompletionBody, ToolFields
from router.openai.json import HINT, INSTEAD, UNSUPPORTED
from router.openai.prompt import MAX_PARTS, MAX_PROMPTS, MAX_TOOLS
from router.openai.responses.body import (
    LOGPROBS,
    NEVER_INCLUDED,
    CallItem,
    CallOutputItem,
    FunctionTool,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
)
from router.openai.tokenization import DetokenizeBody, TokenizeBody

BODIES: Final = (CompletionBody, ChatBody, ResponsesBody, TokenizeBody, DetokenizeBody, InferBody, GenerateBody)
ITEMS: Final = (MessageItem, CallItem, CallOutputItem, ReasoningItem)
PLACE: Final = "#/components/schemas/{name}"
_HINT: Final = "A hint that changes nothing here. Any value is taken, and listed in the header x-pdserve-ignored-fields."
_SEED_LOW: Final = -(1 << 63)

_LIMITS: Final[dict[str, tuple[Limit, ...]]] = {
    **limits_of(SamplingParams),
    **limits_of(RequestSpec),
    "n": (MAX_CHOICES,),
    "best_of": (MAX_CHOICES,),
    "session_id": (SESSION_ID,),
    "timeout": (IntRange(1, MAX_TIMEOUT_US),),
}
_SAME: Final = {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens", "top_logprobs": "logprobs"}
"""Fields with the limits of another one, whose value they set."""


def body_schemas() -> dict[str, dict[str, Any]]:
    """Return the schemas of the bodies and of all that is in them, by name."""
    _, schemas = msgspec.json.schema_components([*BODIES, *ITEMS, ToolFields, FunctionTool], ref_template=PLACE)
    for shape, schema in schemas.items():
        for name, value in schema.get("properties", {}).items():
            schema["properties"][name] = _described(shape, name, value)
    _details(schemas)
    return schemas


def _described(shape: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a field of `shape` with its limits and its meaning."""
    default = schema.get("default")
    if isinstance(default, dict) and UNSUPPORTED in default:
        if default[HINT]:
            return {"description": _HINT}
        return _unsupported(list(default[UNSUPPORTED]), INSTEAD.get(name, "") if shape.endswith("Body") else "")
    told = {key: value for key, value in schema.items() if key != "default"}
    kinds = told.get("anyOf", [told])
    for limit in _LIMITS.get(_SAME.get(name, name), ()):
        for kind in kinds:
            kind |= _limit(name, limit, kind)
    if (meaning := FIELDS.get(f"{shape}.{name}") or FIELDS.get(name)) is not None:
        told["description"] = meaning
    return told


def _unsupported(neutral: list[Any], instead: str) -> dict[str, Any]:
    """Return the schema of a field whose effect does not exist. `instead`: the field that takes its place, or empty."""
    advice = f" Use `{instead}`." if instead else ""
    meaning = f"Its effect does not exist here. Values that ask for it are refused by name.{advice}"
    return {"enum": [*neutral, None], "description": meaning}


def _limit(name: str, limit: Limit, kind: dict[str, Any]) -> dict[str, Any]:
    """Return what a limit adds to the schema of one type of a field."""
    match limit, kind.get("type"):
        case IntRange(low, high), "integer":
            return {"minimum": {"top_k": -1, "seed": _SEED_LOW}.get(name, low), "maximum": high}
        case RealRange(low, high), "number":
            return {"minimum": low, "maximum": high}
        case MaxBytes(count), "string":
            return {"maxLength": count}
        case MaxCount(count, _), "array":
            return {"maxItems": count}
        case MaxCount(count, _), "object":
            return {"maxProperties": count}
        case TextLengths(low, high), "array":
            return {"items": {"type": "string", "minLength": low, "maxLength": high}}
        case TextLengths(low, high), "string":
            return {"minLength": low, "maxLength": high}
    return {}


def _details(schemas: dict[str, dict[str, Any]]) -> None:
    """Add what only the code behind the structs knows."""
    chat, completion, responses = (schemas[kind.__name__] for kind in (ChatBody, CompletionBody, ResponsesBody))
    generate, infer = schemas[GenerateBody.__name__], schemas[InferBody.__name__]
    for body, name in (
        (chat, "messages"),
        (completion, "prompt"),
        (responses, "input"),
        (generate, "text_input"),
        (infer, "inputs"),
    ):
        body["required"] = [name]
        body["properties"][name]["anyOf"].remove({"type": "null"})
    for body in (chat, completion, responses, generate):
        body["properties"]["placement"] |= {"anyOf": [{"enum": [one.value for one in Placement]}, {"type": "null"}]}
    for schema in schemas.values():  # a field that no struct names is left out, and listed in a header of the answer
        schema.pop("additionalProperties", None)
    _lists(chat["properties"]["messages"]).update(minItems=1, maxItems=MAX_MESSAGES)
    _lists(completion["properties"]["prompt"])["minItems"] = 1
    completion["properties"]["prompt"]["description"] += f" At most {MAX_PROMPTS} prompts are allowed."
    for name in ("Message", MessageItem.__name__):
        _lists(schemas[name]["properties"]["content"])["maxItems"] = MAX_PARTS
    items = _lists(responses["properties"]["input"])
    entries = {"anyOf": [{"$ref": PLACE.format(name=kind.__name__)} for kind in ITEMS]}
    items |= {"items": entries, "minItems": 1, "maxItems": MAX_MESSAGES}
    for body, tool in ((chat, ToolFields), (responses, FunctionTool)):
        _lists(body["properties"]["tools"]).update(items={"$ref": PLACE.format(name=tool.__name__)}, maxItems=MAX_TOOLS)
    _lists(responses["properties"]["include"])["items"] = {"enum": [LOGPROBS, *sorted(NEVER_INCLUDED)]}


def _lists(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema's alternative that is a list."""
    kinds: Iterable[dict[str, Any]] = schema["anyOf"]
    return next(kind for kind in kinds if kind.get("type") == "array")
