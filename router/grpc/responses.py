"""The messages of an answer."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.core.error_table import retry_after_s
from pdserve.core.errors import PdserveError
from pdserve.core.report import Report
from pdserve.rpc import status
from pdserve.rpc.codec import finish_to_wire, logprobs_to_wire, placement_to_wire
from pdserve.rpc.v1 import inference_pb2
from router.api.answer import Delta, Generation

_COUNTS: Final = ("prompt_tokens", "output_tokens", "cached_tokens")
"""The fields of a report that stand in `Usage`."""


def response(generation: Generation, delta: Delta, choice: int = 0) -> inference_pb2.GenerateResponse:
    """Return the message of one delta. The last one also has the usage and the report."""
    told = inference_pb2.GenerateResponse(
        request_id=generation.request_id,
        index=delta.index,
        ids=delta.ids,
        text=delta.text,
        logprobs=logprobs_to_wire(delta.logprobs),
        prompt_logprobs=logprobs_to_wire(delta.prompt_logprobs),
        tool_calls=[inference_pb2.ToolCallDelta(**msgspec.structs.asdict(call)) for call in delta.calls],
        reasoning=delta.reasoning,
        choice=choice,
    )
    if delta.finish_reason is None:
        return told
    report = generation.report
    told.finish_reason = finish_to_wire(delta.finish_reason)
    counts = {name: getattr(report, name) for name in _COUNTS}
    told.usage.CopyFrom(inference_pb2.Usage(**counts))
    told.report.CopyFrom(_report(report))
    return told


def error_response(error: PdserveError) -> inference_pb2.GenerateError:
    """Return the error of one request of a batch."""
    return inference_pb2.GenerateError(
        reason=status.to_reason(error.code), message=error.message, retry_after_s=retry_after_s(error)
    )


def _report(report: Report) -> inference_pb2.RequestReport:
    values = report.values()
    for name in (*_COUNTS, "retry_reasons", "rebinds", "migrations"):
        del values[name]
    values["placement"] = placement_to_wire(report.placement)
    return inference_pb2.RequestReport(**values)
