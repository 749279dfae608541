"""What every answer tells of how it was served, also one that failed: the report, as one short line of JSON."""

from __future__ import annotations

import json
from typing import Any

from pdserve.core.errors import InternalBug
from router.api.answer import Generation, Report


def report_json(report: Report) -> dict[str, Any]:
    """By field name, as `RequestReport` names them; durations to the microsecond."""
    values = report.values() | {"placement": report.placement.value}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}


def timeline(report: Report) -> str:
    """ASCII, without line ends: fit for gRPC metadata and for an HTTP header. Some 600 bytes."""
    return json.dumps(report_json(report), separators=(",", ":"))


def report_of(generation: Generation) -> Report | None:
    """None while it runs: what fails then is not the request itself."""
    try:
        return generation.report
    except InternalBug:
        return None
