"""The JSON schema of an output that must be calls. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

_NO_SCHEMAS: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are data, in which `$ref` is no reference."""


def schema_of_arguments(parameters: str) -> str:
    """Return the schema of the arguments of one tool. `parameters` is the schema that the tool gives, or empty."""
    return json.dumps(_object(parameters))


def schema_of_calls(parameters: Mapping[str, str], most: int | None) -> str:
    """Return the schema of a list of calls, at most `most`, each an object with a name and parameters. `parameters` has the
    schema of each tool by its name."""
    held: dict[str, Any] = {}
    calls = []
    for index, (name, text) in enumerate(parameters.items()):
        key = f"tool{index}"
        held[key] = _moved(_object(text), f"#/$defs/{key}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{key}"}},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    listed: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": held}
    return json.dumps(listed if most is None else {**listed, "maxItems": most})


def _object(parameters: str) -> dict[str, Any]:
    """Return the schema as that of an object. Without a schema a tool takes no arguments."""
    schema = json.loads(parameters) if parameters else {"properties": {}, "additionalProperties": False}
    return {"type": "object", **schema}


def _moved(schema: Any, place: str) -> Any:
    """Return a schema that has moved to `place`: its references within itself follow it."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: part if key in _NO_SCHEMAS else _moved(part, place) for key, part in schema.items()}
    target = moved.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = place + target[1:]
    return moved
