"""Fields of OpenAI's or vLLM's API whose effect does not exist here.

A client that asks for the effect gets an error. A client that sends the neutral value, as many libraries always do, is served.
If such fields were ignored, the answer would quietly differ from what was asked for. A hint is a field that only says how the
server may go about its work, or what else it may tell: any value is taken, and what is not neutral is listed as left out.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, Final

import msgspec

from pdserve.core.errors import InvalidRequest
from router.openai.ignored import NOTHING, Ignored, left_out
from router.openai.json import decode, refuse, show

MAX_SMALL_BYTES: Final = 100  # bytes of JSON; no neutral value is larger, so a larger value is never decoded
UNSUPPORTED: Final = "neutral"
HINT: Final = "hint"
"""The marks of these fields in the schemas that msgspec writes."""
INSTEAD: Final = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
    "functions": "tools",
    "function_call": "tool_choice",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "previous_response_id": "input",
    "conversation": "input",
}
"""The fields of a body that take the place of those that do not exist. The last five are lacking in `/v1/responses` alone."""
_VALUE: Final = msgspec.json.Decoder()


class _Unsupported(msgspec.Struct, frozen=True):
    """The default of a field whose effect does not exist. It holds the values that ask for nothing. msgspec writes it into the
    schemas of bodies, where `router.openai.document` finds it."""

    neutral: tuple[Any, ...]
    hint: bool = False


def unsupported(*neutral: Any) -> Any:
    """Return the default of a field whose effect does not exist. `neutral` are the values that ask for nothing; absent and null
    always do."""
    return _Unsupported(neutral)


def hint(*neutral: Any) -> Any:
    """Return the default of a hint. `neutral` are the values that ask for nothing and are not listed."""
    return _Unsupported(neutral, hint=True)


@cache
def hints(shape: type[msgspec.Struct]) -> frozenset[str]:
    """Return the names of the hints among the fields whose effect does not exist."""
    fields = msgspec.structs.fields(shape)
    return frozenset(one.name for one in fields if isinstance(one.default, _Unsupported) and one.default.hint)


@cache
def neutral_values(shape: type[msgspec.Struct]) -> dict[str, tuple[Any, ...]]:
    """Return for each field whose effect does not exist the values that ask for nothing."""
    fields = msgspec.structs.fields(shape)
    return {field.name: field.default.neutral for field in fields if isinstance(field.default, _Unsupported)}


@cache
def _reader(shape: type[msgspec.Struct]) -> tuple[Callable[[msgspec.Struct], Any], Any]:
    """Return what reads all fields whose effect does not exist, and what it reads if none is given."""
    names = neutral_values(shape)
    defaults = tuple(field.default for field in msgspec.structs.fields(shape) if field.name in names)
    if len(defaults) < 2:  # `attrgetter` returns no tuple for one name, and takes none at all
        return lambda fields: tuple(getattr(fields, name) for name in names), defaults
    return attrgetter(*names), defaults


def refuse_unsupported(fields: msgspec.Struct, place: str = "") -> Ignored:
    """Check that no field of the object that is called `place` asks for an effect that does not exist here; empty: the body.
    Return the hints that were left out. Raises `InvalidRequest` naming the first field that asks for more."""
    given, defaults = _reader(type(fields))
    if given(fields) == defaults:  # nearly always: one comparison of identities in place of forty
        return NOTHING
    taken = []
    for name, neutral in neutral_values(type(fields)).items():
        raw = getattr(fields, name)
        if not isinstance(raw, msgspec.Raw):
            continue
        field = f"{place}.{_encoded_name(type(fields), name)}" if place else _encoded_name(type(fields), name)
        value, is_neutral = _value(field, bytes(raw), neutral)
        if is_neutral:
            continue
        if name not in hints(type(fields)):
            raise _refusal(field, value, neutral)
        taken.append(name)
    return left_out(place, taken)


def _encoded_name(shape: type[msgspec.Struct], name: str) -> str:
    """Return the name of a field in JSON, which may be a word of Python."""
    return next(field.encode_name for field in msgspec.structs.fields(shape) if field.name == name)


def _value(field: str, text: bytes, neutral: tuple[Any, ...]) -> tuple[Any, bool]:
    """Return the value, or the beginning of its text if it is large, and True if it asks for nothing."""
    small = len(text) <= MAX_SMALL_BYTES
    value = decode(text, _VALUE, field) if small else text[:MAX_SMALL_BYTES].decode(errors="replace")
    return value, value is None or any(type(value) is type(accepted) and value == accepted for accepted in neutral)


def _refusal(field: str, value: Any, neutral: tuple[Any, ...]) -> InvalidRequest:
    allowed = f"; only {' or '.join(map(show, neutral))} is accepted" if neutral else ""
    advice = f"; use {INSTEAD[field]}" if field in INSTEAD else ""
    return refuse(field, f"{show(value)} is not supported{allowed}{advice}")
