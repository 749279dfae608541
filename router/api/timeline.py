"""The timeline: each answer, a failed one too, carries the report of how it was served as one short line of JSON."""

from __future__ import annotations

import json
from typing import Any

from pdserve.core.errors import InternalBug
from router.api.answer import Generation, Report


def report_json(report: Report) -> dict[str, Any]:
    """Return the report by the field names of `RequestReport`. Durations are rounded to the microsecond."""
    values = report.values() | {"placement": report.placement.value}
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}


def timeline(report: Report) -> str:
    """Return the report as one ASCII line, fit for gRPC metadata and for an HTTP header. It has some 600 bytes."""
    return json.dumps(report_json(report), separators=(",", ":"))


def report_of(generation: Generation) -> Report | None:
    """Return the report of a generation. None: it still runs, so what failed is not the request itself."""
    try:
        return generation.report
    except InternalBug:
        return None
