"""JSON of clients, which is read strictly, and of answers and errors in OpenAI's shape.

A client's JSON becomes a typed structure: an error names each value of the wrong type, and no value is converted. Errors name
the field as the client wrote it, with its place in a list (`messages[1].content[0].type`).

A field that no API documents is left out, and the client is told its name. A body is decoded strictly at first, so a request
without such fields pays nothing. If the decoder meets one, a second pass leaves all of them out and keeps their names. A name
is a client's text, so it is cut and reduced to characters that are safe in a header.

A field of OpenAI's or vLLM's API may have an effect that does not exist here. A client that asks for the effect gets an error.
A client that sends the neutral value, as many libraries always do, is served. If such fields were ignored, the answer would
quietly differ from what was asked for. A hint is a field that only says how the server may go about its work, or what else it
may tell: any value is taken, and what is not neutral is listed as left out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, Final, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Raw, Struct

from pdserve.core.error_table import TABLE, retry_after_s
from pdserve.core.errors import ContextOverflow, ErrorCode, InvalidRequest, PdserveError, RouterStopping
from pdserve.core.limits import MAX_MESSAGES

MAX_SHOWN_CHARS: Final = 60  # a message shows so much of a refused value

_CONSTANTS: Final = {None: "null", True: "true", False: "false"}
_MISMATCH: Final = re.compile("Expected `(.+)`, got `(.+)`")
_MISSING: Final = re.compile("Object missing required field `(.+)`")
_UNKNOWN_FIELD: Final = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `\$(?P<place>.*)`)?", re.DOTALL)
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
    if unknown := _UNKNOWN_FIELD.fullmatch(str(error)):
        field += f"{unknown['place'] or ''}.{show(unknown['name'])[1:-1]}"
        return refuse(field.removeprefix("."), "is an unknown field of this object")
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


# Answers and errors ------------------------------------------------------------------------------------------------

_OPENAI_CODES: Final = {ErrorCode.UNKNOWN_MODEL: "model_not_found"}
"""Clients match on the codes that OpenAI itself has. For other errors our own codes say more."""
_OVERFLOW_CODE: Final = "context_length_exceeded"
"""OpenAI's code of a `ContextOverflow`, which is an `invalid_request` here."""


def encode_json(payload: Any) -> bytes:
    """Return compact ASCII JSON. Anything that a client wrote can be quoted in it without an encoding error."""
    return json.dumps(payload, separators=(",", ":"), allow_nan=False).encode()


def error_payload(error: PdserveError) -> dict[str, Any]:
    """Return the error in OpenAI's shape. `param` is the field of an `InvalidRequest`, else null."""
    param = error.field if isinstance(error, InvalidRequest) else None
    code = _OVERFLOW_CODE if isinstance(error, ContextOverflow) else _OPENAI_CODES.get(error.code, error.code.value)
    return {"error": {"message": error.message, "type": TABLE[error.code].openai_type, "param": param, "code": code}}


def error_headers(error: PdserveError) -> list[tuple[bytes, bytes]]:
    """Return Retry-After where waiting helps. OpenAI's clients repeat every other 5xx by themselves, so those get
    x-should-retry: false. A router that ends closes the connection, so that the next try goes elsewhere."""
    row = TABLE[error.code]
    wait_s = retry_after_s(error)
    if wait_s is not None:
        close = [(b"connection", b"close")] if isinstance(error, RouterStopping) else []
        return [(b"retry-after", str(max(1, math.ceil(wait_s))).encode()), *close]
    return [(b"x-should-retry", b"false")] if row.http >= 500 else []


# Fields that are left out ------------------------------------------------------------------------------------------

MAX_NAMES: Final = 16  # of the fields that an answer lists; the others are counted
MAX_NAME_CHARS: Final = 64  # of one field's own name
_UNKNOWN: Final = "Object contains unknown field"  # msgspec's words
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_INDEX: Final = re.compile(r"\[[0-9]+\]")
_MEMBERS: Final = msgspec.json.Decoder(dict[str, Raw])
_LIST: Final = msgspec.json.Decoder(list[Raw])

Fields = TypeVar("Fields", bound=Struct)


@dataclass(frozen=True, slots=True)
class Ignored:
    """The fields of one body that were left out."""

    names: tuple[str, ...] = ()
    """The first names, in printable ASCII without spaces, commas and quotes."""
    count: int = 0
    more: bool = False
    """There are names beyond those that `names` holds."""

    @property
    def header(self) -> bytes:
        """The names as the value of a header. Dots at the end stand for names that are not listed."""
        return ", ".join(self.names + (("...",) if self.more else ())).encode("ascii")


NOTHING: Final = Ignored()


def joined(parts: Iterable[Ignored]) -> Ignored:
    """Return what was left out of several parts of one body."""
    names: dict[str, None] = {}
    count, more = 0, False
    for part in parts:
        if part.count:
            names |= dict.fromkeys(part.names)
            count += part.count
            more |= part.more
    return Ignored(tuple(names)[:MAX_NAMES], count, more or len(names) > MAX_NAMES)


def decode_body(data: bytes, decoder: msgspec.json.Decoder[Fields], field: str = "") -> tuple[Fields, Ignored]:
    """Decode a body, or an object of one that is called `field`, whose struct forbids unknown fields. Unknown fields are left
    out. Raises `InvalidRequest`."""
    try:
        return decode(data, decoder, field), NOTHING
    except InvalidRequest as exc:
        if not isinstance(exc.__cause__, msgspec.ValidationError) or not str(exc.__cause__).startswith(_UNKNOWN):
            raise
    leaver = _Leaver()
    kept = leaver.without(data, decoder.type, _INDEX.sub("[]", f"{field}.") if field else "")
    return decode(kept, decoder, field), Ignored(tuple(leaver.names), leaver.count, leaver.more)


def ignored_in(data: bytes, shape: type[Struct], field: str) -> Ignored:
    """Return the unknown fields of a list of objects that is decoded elsewhere, where they have been left out."""
    leaver = _Leaver()
    leaver.nested(data, shape, field)
    return Ignored(tuple(leaver.names), leaver.count, leaver.more)


def left_out(place: str, names: Iterable[str]) -> Ignored:
    """Return what was left out of the object that is called `place`; empty: of the body."""
    leaver = _Leaver()
    for name in names:
        leaver.add(_INDEX.sub("[]", f"{place}.") if place else "", name)
    return Ignored(tuple(leaver.names), leaver.count, leaver.more)


class _Leaver:
    """Leaves unknown fields out of JSON, and collects their names."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}
        self.count = 0
        self.more = False

    def without(self, data: bytes, shape: type[Struct], prefix: str) -> bytes:
        """Return the object without its unknown fields. What is no object is returned as it is: the decoder refuses it."""
        if not data.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{"):
            return data
        fields = _fields(shape)
        kept = {}
        for name, value in decode(data, _MEMBERS).items():
            if name not in fields:
                self.add(prefix, name)
            else:
                nested = fields[name]
                kept[name] = value if nested is None else Raw(self.nested(bytes(value), nested, prefix + name))
        return msgspec.json.encode(kept)

    def nested(self, data: bytes, shape: type[Struct], field: str) -> bytes:
        """Return an object, or a list of objects, without unknown fields."""
        if not data.startswith(b"["):
            return self.without(data, shape, f"{field}.")
        items = decode(data, _LIST)
        if len(items) > MAX_MESSAGES:
            raise refuse(field, f"holds {len(items)} entries; at most {MAX_MESSAGES} are allowed")
        return msgspec.json.encode([Raw(self.without(bytes(item), shape, f"{field}[].")) for item in items])

    def add(self, prefix: str, name: str) -> None:
        """Add a name, which is a client's text, behind a prefix that is ours."""
        self.count += 1
        own = _UNSAFE.sub("?", name[:MAX_NAME_CHARS]) or "?"
        told = prefix + own + ("..." if len(name) > MAX_NAME_CHARS else "")
        if len(self.names) < MAX_NAMES:
            self.names[told] = None
        elif told not in self.names:
            self.more = True


@cache
def _fields(shape: type[Struct]) -> dict[str, type[Struct] | None]:
    """Return for each field of a struct the struct of its value, or of its value's entries. None: it holds no struct."""
    hints = get_type_hints(shape)
    return {one.encode_name: _struct_in(hints[one.name]) for one in msgspec.structs.fields(shape)}


def _struct_in(kind: Any) -> type[Struct] | None:
    if isinstance(kind, type) and issubclass(kind, Struct):
        return kind
    return next((found for part in get_args(kind) if (found := _struct_in(part)) is not None), None)


# Fields whose effect does not exist --------------------------------------------------------------------------------

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
    schemas of bodies, where `router.document` finds it."""

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
            raise _unsupported_refusal(field, value, neutral)
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


def _unsupported_refusal(field: str, value: Any, neutral: tuple[Any, ...]) -> InvalidRequest:
    allowed = f"; only {' or '.join(map(show, neutral))} is accepted" if neutral else ""
    advice = f"; use {INSTEAD[field]}" if field in INSTEAD else ""
    return refuse(field, f"{show(value)} is not supported{allowed}{advice}")
