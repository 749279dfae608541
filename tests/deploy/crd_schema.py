"""A published CRD as a strict JSON schema: Kubernetes prunes unknown fields silently, here they are errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft7Validator

Schema = dict[str, Any]


def strict_validator(crd: Path, version: str) -> Draft7Validator:
    """For objects of one version of the CRD."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 17,000 lines: the C parser takes a tenth of the time
    document = yaml.load(crd.read_text(), Loader=loader)
    row = next(row for row in document["spec"]["versions"] if row["name"] == version)
    schema = strict(row["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # ObjectMeta: its schema is the server's, not the CRD's
    return Draft7Validator(schema)


def strict(schema: Schema) -> Schema:
    """A copy in which objects with named properties take no others, unless the CRD says that they may."""
    result: Schema = {}
    for key, value in schema.items():
        if key == "properties":
            result[key] = {name: strict(child) for name, child in value.items()}
        elif key in ("items", "additionalProperties", "not") and isinstance(value, dict):
            result[key] = strict(value)
        else:
            result[key] = value
    if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        result.setdefault("additionalProperties", False)
    return result
