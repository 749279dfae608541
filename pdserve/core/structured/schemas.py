"""A JSON schema loses formats that are not enforced, and a look-ahead that it does not need, before it is compiled. Pure."""

from __future__ import annotations

import re
from collections import deque
from typing import Any, Final

FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""The formats that llguidance 1.9 enforces, and the format that it takes for no format. It refuses all others. For JSON Schema
(2020-12, validation 7.2.1) a format is a remark that need not be enforced; pydantic writes `path`, `password` and more."""
SCHEMAS_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose values map names to schemas. Clients choose these names, so a name may equal a keyword."""
_LISTS_OF_SCHEMAS: Final = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # the last keyword up to 2019-09
_SCHEMAS: Final = ("items", "additionalItems", "additionalProperties")
_NOT_ALL_OF: Final = re.compile(r"\^\(\?!\^\[((?!\^)(?:[^\]\\]|\\.)+)\]\*\$\)([^|]*)", re.DOTALL)
"""A pattern that begins with "not only these characters", which pydantic writes for `Decimal`."""


def simplify(schema: Any) -> list[str]:
    """Take the formats that are not enforced out of a schema, in place, and return their names. Formats inside data, such as
    the value of a `const`, stay, and so do formats below keywords that the compiler does not have.

    llguidance has no look-ahead. "Not only these characters" needs none: it means that there is another character.
    """
    formats: dict[str, None] = {}
    left = deque([schema])
    while left:
        one = left.popleft()
        if not isinstance(one, dict):
            continue
        form = one.get("format")
        if isinstance(form, str) and form not in FORMATS:
            del one["format"]
            formats[form] = None
        _drop_look_ahead(one)
        for key, value in one.items():
            if key in _LISTS_OF_SCHEMAS and isinstance(value, list):
                left.extend(value)
            elif key in SCHEMAS_BY_NAME and isinstance(value, dict):
                left.extend(value.values())
            elif key in _SCHEMAS:
                left.append(value)
    return list(formats)


def _drop_look_ahead(schema: dict[str, Any]) -> None:
    pattern, others = schema.get("pattern"), schema.get("allOf", [])
    if isinstance(pattern, str) and isinstance(others, list) and (found := _NOT_ALL_OF.fullmatch(pattern)):
        schema["pattern"] = f"^{found[2]}"
        schema["allOf"] = [*others, {"pattern": f"[^{found[1]}]"}]
