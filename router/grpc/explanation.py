"""The explanation of a request becomes the message that `ExplainRequest` answers with."""

from __future__ import annotations

from typing import Final

from pdserve.rpc.codec import entries_to_wire
from pdserve.rpc.v1 import common_pb2, story_pb2
from router.api.explanation import Explanation, WorkerPart

_ROLES_TO_WIRE: Final = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}


def explanation_to_wire(explanation: Explanation) -> story_pb2.ExplainRequestResponse:
    """Return the message of an explanation, with times relative to the request's arrival."""
    return story_pb2.ExplainRequestResponse(
        request_id=explanation.request_id,
        correlation_id=explanation.correlation_id,
        outcome=explanation.outcome,
        entries=entries_to_wire(explanation.entries, since_s=explanation.arrived_s),
        left_out=explanation.left_out,
        workers=[_part(part, explanation.arrived_s) for part in explanation.parts],
        others=explanation.others,
    )


def _part(part: WorkerPart, arrived_s: float) -> story_pb2.WorkerPart:
    return story_pb2.WorkerPart(
        worker_id=part.worker_id,
        role=_ROLES_TO_WIRE[part.role],
        entries=entries_to_wire(part.entries, since_s=arrived_s),
        left_out=part.left_out,
        missing=part.missing,
    )
