"""The codec of a dataclass whose message has the same fields. A new field is named in the dataclass and in `proto/` only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields as fields_of
from operator import attrgetter
from typing import Any, Final, Generic, TypeVar, cast

from google.protobuf.message import Message

from pdserve.core.limits import field_types

Value = TypeVar("Value")
Wire = TypeVar("Wire", bound=Message)
Converter = tuple[Callable[[Any], Any], Callable[[Any], Any]]
"""One function that writes the value of a field to its message, and one that reads it back."""

_BY_TYPE: Final[dict[Any, Converter]] = {
    tuple[str, ...]: (tuple, tuple),
    tuple[int, ...]: (tuple, tuple),
    tuple[tuple[int, float], ...]: (dict, lambda entries: tuple(sorted(entries.items()))),
}


class FieldCodec(Generic[Value, Wire]):
    """Writes values of the dataclass `kind` as messages of the type `wire`, and reads them back.

    Numbers, texts and booleans are copied. None is written as a field that is not set. A boolean whose default is true is true
    in a message that does not have it, as older senders write. `special` has the converters of fields
    that have another form on the wire. An AssertionError tells that the two types do not have the same fields.
    """

    def __init__(self, kind: type[Value], wire: type[Wire], **special: Converter) -> None:
        types = field_types(kind)
        assert set(types) == set(wire.DESCRIPTOR.fields_by_name), f"{kind.__name__} and its message differ"
        self._kind, self._wire = kind, wire
        self._names = tuple(types)
        self._read = attrgetter(*types)
        self._special = {name: _BY_TYPE[one] for name, one in types.items() if one in _BY_TYPE} | special
        self._optional = tuple(name for name, one in types.items() if type(None) in getattr(one, "__args__", ()))
        self._true = tuple(one.name for one in fields_of(cast(Any, kind)) if one.default is True)

    def to_wire(self, value: Value) -> Wire:
        """Return the message of a value."""
        return self._wire(**self.to_fields(value))

    def to_fields(self, value: Value) -> dict[str, Any]:
        """Return the fields of the message, as the constructor of a message around it takes them.

        protobuf serialises and parses a whole message that a constructor gets, but not such fields. Zeros and empty values are
        left out, since the message has them anyway: it is most of the time that a constructor takes.
        """
        named = zip(self._names, self._read(value), strict=True)
        fields = {name: one for name, one in named if one or (one is not None and name in self._optional)}
        for name in self._true:
            fields.setdefault(name, False)
        for name, (write, _) in self._special.items():
            if name in fields:
                fields[name] = write(fields[name])
        return fields

    def from_wire(self, message: Wire) -> Value:
        """Return the value of a message. Raises what the dataclass and the converters raise."""
        fields = dict(zip(self._names, self._read(message), strict=True))
        for name in self._optional:
            if not message.HasField(name):
                fields[name] = None
        for name in self._true:
            if not message.HasField(name):
                fields[name] = True
        for name, (_, read) in self._special.items():
            if fields[name] is not None:
                fields[name] = read(fields[name])
        return self._kind(**fields)
