"""Fields of OpenAI's or vLLM's API whose effect does not exist here.

A client that asks for the effect gets an error. A client that sends the neutral value, as many libraries always do, is served.
If such fields were ignored, the answer would quietly differ from what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any, Final

import msgspec

from router.openai.json import decode, refuse, show

MAX_SMALL_BYTES: Final = 100  # bytes of JSON; no neutral value is larger, so a larger value is never decoded
UNSUPPORTED: Final = "neutral"
"""The mark of these fields in the schemas that msgspec writes."""
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
}
"""The fields of a body that take the place of those that do not exist. The last three are lacking in `/v1/responses` alone."""
_VALUE: Final = msgspec.json.Decoder()


class _Unsupported(msgspec.Struct, frozen=True):
    """The default of a field whose effect does not exist. It holds the values that ask for nothing. msgspec writes it into the
    schemas of bodies, where `router.openai.document` finds it."""

    neutral: tuple[Any, ...]


def unsupported(*neutral: Any) -> Any:
    """Return the default of a field whose effect does not exist. `neutral` are the values that ask for nothing; absent and null
    always do."""
    return _Unsupported(neutral)


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


def refuse_unsupported(fields: msgspec.Struct, prefix: str = "") -> None:
    """Check that no field asks for an effect that does not exist here. Raises `InvalidRequest` naming the first that does."""
    given, defaults = _reader(type(fields))
    if given(fields) == defaults:  # nearly always: one comparison of identities in place of forty
        return
    for name, neutral in neutral_values(type(fields)).items():
        raw = getattr(fields, name)
        if isinstance(raw, msgspec.Raw):
            _refuse_unless_neutral(prefix + _encoded_name(type(fields), name), bytes(raw), neutral)


def _encoded_name(shape: type[msgspec.Struct], name: str) -> str:
    """Return the name of a field in JSON, which may be a word of Python."""
    return next(field.encode_name for field in msgspec.structs.fields(shape) if field.name == name)


def _refuse_unless_neutral(field: str, text: bytes, neutral: tuple[Any, ...]) -> None:
    small = len(text) <= MAX_SMALL_BYTES
    value = decode(text, _VALUE, field) if small else text[:MAX_SMALL_BYTES].decode(errors="replace")
    if value is None or any(type(value) is type(accepted) and value == accepted for accepted in neutral):
        return
    allowed = f"; only {' or '.join(map(show, neutral))} is accepted" if neutral else ""
    advice = f"; use {INSTEAD[field]}" if field in INSTEAD else ""
    raise refuse(field, f"{show(value)} is not supported{allowed}{advice}")
