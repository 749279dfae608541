"""Reads a client's JSON into a typed structure: an error names each value of the wrong type, and no value is converted.

Errors name the field as the client wrote it, with its place in a list (`messages[1].content[0].type`).
"""

from __future__ import annotations

import re
from typing import Any, Final, TypeVar

import msgspec

from pdserve.core.errors import InvalidRequest

MAX_SHOWN_CHARS: Final = 60  # a message shows so much of a refused value

_CONSTANTS: Final = {None: "null", True: "true", False: "false"}
_MISMATCH: Final = re.compile("Expected `(.+)`, got `(.+)`")
_MISSING: Final = re.compile("Object missing required field `(.+)`")
_KINDS: Final = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
}

Shape = TypeVar("Shape")


def refuse(field: str, message: str) -> InvalidRequest:
    """Return the error for one field. The name always leads, because a short one, such as `n`, is part of many words."""
    return InvalidRequest(f"{field}: {message}", field=field)


def renamed(error: InvalidRequest, field: str) -> InvalidRequest:
    """Return the error with another name of its field, which also leads its message."""
    told = error.message.removeprefix(error.field).removeprefix(": ")
    return type(error)(f"{field}: {told}", field=field)


def show(value: Any) -> str:
    """Return a client's value for a message. It is ASCII and cut, so that a huge value makes no huge error. Constants are
    those of JSON."""
    if value is None or isinstance(value, bool):
        return _CONSTANTS[value]
    text = ascii(value if not isinstance(value, str) else value[:MAX_SHOWN_CHARS])
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def decode(data: bytes, decoder: msgspec.json.Decoder[Shape], field: str = "") -> Shape:
    """Decode the JSON of a body, or of one field, as the decoder's type. Raises `InvalidRequest` for everything else, however
    hostile."""
    try:
        return decoder.decode(data.decode("utf-8-sig"))  # msgspec does not check the UTF-8 of parts that it skips
    except msgspec.ValidationError as exc:
        raise _refusal(exc, field) from exc
    except RecursionError as exc:
        raise refuse(field or "body", "is nested too deeply") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise refuse(field or "body", f"is not valid JSON: {show(str(exc).removeprefix('JSON is malformed: '))}") from exc


def convert(value: Any, shape: type[Shape], field: str) -> Shape:
    """Return a value that was decoded as one of several types as the type `shape`. Raises `InvalidRequest` naming the field."""
    try:
        return msgspec.convert(value, shape)
    except msgspec.ValidationError as exc:
        raise _refusal(exc, field) from exc


def _refusal(error: msgspec.ValidationError, field: str) -> InvalidRequest:
    """Return an error in our words. msgspec's own words are, for example: "Expected `int | null`, got `str` - at `$.seed`"."""
    message, _, place = str(error).partition(" - at `$")
    field += place.removesuffix("`")
    if missing := _MISSING.fullmatch(message):
        field, message = f"{field}.{missing[1]}", "is missing"
    elif mismatch := _MISMATCH.fullmatch(message):
        wanted = " or ".join(_KINDS.get(name, name) for name in mismatch[1].split(" | ") if name != "null")
        found = "a decimal number" if mismatch[2] == "float" else _KINDS.get(mismatch[2], mismatch[2])
        message = f"must be {wanted}, got {found}"
    elif message.endswith("out of range"):
        message = "is too large for a number"
    return refuse(field.removeprefix(".") or "body", message)
