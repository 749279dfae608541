"""The timeline: each answer, a failed one too, carries the report of how it was served as one short line of JSON."""

from __future__ import annotations

import json
from typing import Any, Final

import msgspec

from pdserve.core.report import Report

_ENCODER: Final = msgspec.json.Encoder()


def report_json(report: Report) -> dict[str, Any]:
    """Return the report by the field names of `RequestReport`. Durations are rounded to the microsecond."""
    values = {name: round(value, 6) if type(value) is float else value for name, value in report.values().items()}
    values["placement"] = report.placement.value
    return values


def timeline(report: Report) -> bytes:
    """Return the report as one line of ASCII JSON, fit for gRPC metadata and for an HTTP header. It has some 600 bytes."""
    values = report_json(report)
    if report.correlation_id.isascii():  # nothing else in a report is a client's text
        line = _ENCODER.encode(values)  # takes a fifth of the time, but leaves other characters as they are
        if line.isascii():
            return line
    return json.dumps(values, separators=(",", ":")).encode()
