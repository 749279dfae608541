"""The form of calls as text between tags, as Qwen3-Coder writes it. Its values have no types: schemas of tools give them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec

from pdserve.text.calls.events import CallEnd
from pdserve.text.calls.machine import CallMachine, Malformed, Steps
from pdserve.text.plain_json import obstacle

_END: Final = "</parameter>"
_STRING: Final = frozenset({"string"})
_NESTED: Final = frozenset({"object", "array"})
_INTEGER: Final = re.compile(r"-?(0|[1-9][0-9]*)")
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_JSON: Final = msgspec.json.Decoder()


class Qwen3Coder(CallMachine):
    """A function between two tags for each call, with its parameters between tags of their own.

    A value that is a text by the schema is reported as it comes. Any other value is reported when it has ended. A value that
    does not fit its type is reported as a text.
    """

    mark = "<tool_call>"

    def __init__(self, names: Collection[str], *, parameters: Mapping[str, str] | None = None, unmixed: bool = False) -> None:
        """See `CallMachine`."""
        super().__init__(names, parameters=parameters, unmixed=unmixed)
        self._schemas = {name: json.loads(text) for name, text in (parameters or {}).items() if text}

    def calls(self) -> Steps:
        """Implements `CallMachine.calls`."""
        yield from self.blanks()
        yield from self.expect("<")
        while True:
            yield from self.expect("function=")
            name = yield from self.word(">")
            self.begin(name)
            self._arguments.append("{")
            try:
                yield from self._parameters(self._schemas.get(name, {}))
            finally:
                self._tell_arguments()
                self._events.add(CallEnd())
            yield from self.blanks()
            yield from self.expect("<")
            if self._char == "/":
                yield from self.expect("/tool_call>")
                self._read.clear()
                return

    def _parameters(self, schema: Mapping[str, Any]) -> Steps:
        """Read the parameters of one call up to the end of its function, and tell them as the members of an object."""
        yield from self.step()
        yield from self.blanks()
        yield from self.expect("<")
        before = ""
        while self._char != "/":
            yield from self.expect("parameter=")
            name = yield from self.word(">")
            self._read.clear()
            self._arguments.append(f"{before}{json.dumps(name, ensure_ascii=False)}: ")
            before = ", "
            properties = schema.get("properties")
            wanted = properties.get(name) if isinstance(properties, dict) else None
            yield from self._typed_value(types_of(wanted, schema))
            yield from self.blanks()
            yield from self.expect("<")
        yield from self.expect("/function>")
        self._read.clear()
        self._arguments.append("}")

    def _typed_value(self, types: frozenset[str]) -> Steps:
        """Read a value and its end. The line end after the first tag, and the one before the last tag, belong to the tags."""
        self._char = yield
        if self._char == "\n":
            self._char = yield
        is_text = types == _STRING
        value: list[str] = []
        if is_text:
            self._arguments.append('"')
        held, matched = "", 0  # a line end that may belong to the last tag, and what is there of this tag
        while matched < len(_END):
            char = self._char
            if char == _END[matched]:
                matched += 1
            else:
                said = held + _END[:matched]
                held, matched = "", 0
                if char == _END[0]:
                    matched = 1
                elif char == "\n":
                    held = char
                else:
                    said += char
                if is_text:
                    self._arguments.append(json.dumps(said, ensure_ascii=False)[1:-1])
                else:
                    value.append(said)
                if not char:
                    raise Malformed
            self._char = yield
        self._arguments.append('"' if is_text else as_json("".join(value), types))


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of JSON that a schema allows. Empty: it does not say. `root` has what it refers to.

    Each part of the schema is looked at once. Parts may refer to each other in circles and many times, so to follow each
    reference anew could take for ever, and nobody is served then.
    """
    types: set[str] = set()
    left, seen = [schema], set[int]()
    while left:
        one = left.pop()
        if not isinstance(one, dict):
            return frozenset()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if own := _own_types(one):
            types |= own
            continue
        target, options = one.get("$ref"), one.get("anyOf", one.get("oneOf"))
        if isinstance(target, str) and target.startswith("#/"):
            left.append(_at(root, target[2:].split("/")))
        elif isinstance(options, list) and options:
            left += options
        else:
            return frozenset()
    return frozenset(types)


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema names itself. Empty: it names none."""
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(map(str, named))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(_type, values)) if isinstance(values, list) else frozenset()


def as_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON of one of the types; empty: of any."""
    stripped = text.strip()
    lower = stripped.lower()
    if (lower == "null" or stripped == "None") and ("null" in types or not types):  # templates write Python's None and True
        return "null"
    if lower in ("true", "false") and ("boolean" in types or not types):
        return lower
    if ("integer" in types and _INTEGER.fullmatch(stripped)) or ("number" in types and _NUMBER.fullmatch(stripped)):
        return stripped
    if not types or types & _NESTED:
        try:
            value = _JSON.decode(stripped)
        except (ValueError, RecursionError):
            value = None
        if value is not None and not obstacle(value) and (not types or _type(value) in types & _NESTED):
            return stripped
    return json.dumps(text, ensure_ascii=False)


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", int: "integer", float: "number", type(None): "null"}
    return names[type(value)]


def _at(root: Any, path: list[str]) -> Any:
    for part in path:
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root
