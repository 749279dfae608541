"""The JSON schemas of outputs that must be calls. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pdserve.core.structured.schemas import SCHEMAS_BY_NAME, simplify

_NO_SCHEMAS: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are data, in which `$ref` is no reference."""


def schema_of_arguments(parameters: str) -> str:
    """Return the schema of the arguments of one tool. `parameters` is the schema that the tool gives, or empty."""
    return json.dumps(object_schema(parameters))


def schema_of_calls(parameters: Mapping[str, str], most: int | None) -> str:
    """Return the schema of a list of calls, at most `most`, each an object with a name and parameters. `parameters` has the
    schema of each tool by its name."""
    held: dict[str, Any] = {}
    calls = []
    for index, (name, text) in enumerate(parameters.items()):
        place = f"tool{index}"
        held[place] = _moved(object_schema(text), f"#/$defs/{place}")
        calls.append({
            "type": "object",
            "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        })  # fmt: skip
    listed: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": held}
    return json.dumps(listed if most is None else {**listed, "maxItems": most})


def object_schema(parameters: str) -> dict[str, Any]:
    """Return the schema as that of an object. Without a schema a tool takes no arguments."""
    schema = json.loads(parameters) if parameters else {"properties": {}, "additionalProperties": False}
    simplify(schema)
    return {"type": "object", **schema}


def _moved(schema: Any, place: str, *, by_name: bool = False) -> Any:
    """Return a schema that has moved to `place`: its references within itself follow it. Those of a schema with an id of its
    own are relative to that. `by_name`: it is no schema, but has schemas by name, and a name may be that of a keyword."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if by_name:
        return {name: _moved(part, place) for name, part in schema.items()}
    if "$id" in schema:
        return schema
    made = {
        key: part if key in _NO_SCHEMAS else _moved(part, place, by_name=key in SCHEMAS_BY_NAME) for key, part in schema.items()
    }
    target = made.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        made["$ref"] = place + target[1:]
    return made
