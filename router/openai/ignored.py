"""The fields of a body that no API documents, and hints that change nothing here. They are left out, and the client is told
their names.

A body is decoded strictly at first, so a request without such fields pays nothing. If the decoder meets one, a second pass
leaves all of them out and keeps their names. A name is a client's text, so it is cut and reduced to characters that are safe in
a header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Raw, Struct

from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import MAX_MESSAGES
from router.openai.json import decode, refuse

MAX_NAMES: Final = 16  # of the fields that an answer lists; the others are counted
MAX_NAME_CHARS: Final = 64  # of one field's own name
_UNKNOWN: Final = "Object contains unknown field"  # msgspec's words
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_INDEX: Final = re.compile(r"\[[0-9]+\]")
_MEMBERS: Final = msgspec.json.Decoder(dict[str, Raw])
_LIST: Final = msgspec.json.Decoder(list[Raw])

Shape = TypeVar("Shape", bound=Struct)


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


def decode_body(data: bytes, decoder: msgspec.json.Decoder[Shape], field: str = "") -> tuple[Shape, Ignored]:
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
