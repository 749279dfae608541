"""The grammars of outputs that must be calls, and of those whose calls must be valid. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from pdserve.core.structured.schemas import simplify

_NO_SCHEMAS: Final = frozenset({"const", "default", "enum", "examples"})
"""Keywords whose values are data, in which `$ref` is no reference."""


def schema_of_arguments(parameters: str) -> str:
    """Return the schema of the arguments of one tool. `parameters` is the schema that the tool gives, or empty."""
    return json.dumps(_object(parameters))


def schema_of_calls(parameters: Mapping[str, str], most: int | None) -> str:
    """Return the schema of a list of calls, at most `most`, each an object with a name and parameters. `parameters` has the
    schema of each tool by its name."""
    held, calls = _calls({name: _object(text) for name, text in parameters.items()}, "parameters")
    listed: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": held}
    return json.dumps(listed if most is None else {**listed, "maxItems": most})


def grammar_of_calls(
    parameters: Mapping[str, str | None], marks: tuple[str, str], most: int | None, options: Mapping[str, Any]
) -> str:
    """Return the Lark grammar of any text in which each call between the two marks is valid, with at most `most` calls.

    `parameters` has the schema of each tool by its name; None: its arguments may be any object. `options` are those of the
    compiler of schemas.
    """
    schemas = {name: {"type": "object"} if text is None else _object(text) for name, text in parameters.items()}
    held, calls = _calls(schemas, "arguments")
    schema = json.dumps({"anyOf": calls, "$defs": held, **options})
    begin = re.escape(marks[0]).replace("/", r"\/")
    times = "*" if most is None else f"{{0,{most}}}"
    return (
        f"start: (head blanks call blanks {json.dumps(marks[1])}){times} LAST?\n"
        f"head[lazy]: /(?s:.*){begin}/\n"
        f"call: %json {schema}\n"
        "blanks: /[ \\n]{0,4}/\n"
        f"LAST: /(?s:.+)/ & ~/(?s:.*){begin}(?s:.*)/\n"
    )


def _calls(schemas: Mapping[str, Any], key: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return definitions of the schemas, and the schema of a call of each tool, whose arguments are called `key`."""
    held: dict[str, Any] = {}
    calls = []
    for index, (name, schema) in enumerate(schemas.items()):
        place = f"tool{index}"
        held[place] = _moved(schema, f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, key: {"$ref": f"#/$defs/{place}"}},
                "required": ["name", key],
                "additionalProperties": False,
            }
        )
    return held, calls


def _object(parameters: str) -> dict[str, Any]:
    """Return the schema as that of an object. Without a schema a tool takes no arguments."""
    schema = json.loads(parameters) if parameters else {"properties": {}, "additionalProperties": False}
    simplify(schema)
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
