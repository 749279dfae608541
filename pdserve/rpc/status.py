"""The one table: error code, gRPC status, HTTP status, wire reason, and who should retry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, cast

import grpc

from pdserve.core import errors
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.rpc.v1 import common_pb2

REASON_METADATA: Final = "pdserve-error-reason"
RETRY_AFTER_METADATA: Final = "retry-after-s"
TIMELINE_METADATA: Final = "pdserve-timeline"
CLUSTER_TOKEN_METADATA: Final = "pdserve-cluster-token"
REQUEST_ID_METADATA: Final = "pdserve-request-id"
CANCEL_TOKEN_METADATA: Final = "pdserve-cancel-token"
CORRELATION_ID_METADATA: Final = "x-request-id"  # what a client gives a request to find it again, as proxies call it

DEFAULT_RETRY_AFTER_S: Final = 1.0
"""When waiting helps and the error does not say how long: a lost worker is noticed, or is back, about then."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    grpc: grpc.StatusCode
    http: int
    openai_type: str
    cluster_retries: bool
    """When a worker ends a request with it, the router tries again, elsewhere or later, within its budgets."""
    client_retries: bool
    """When a client gets it, the same request may succeed later."""


_G = grpc.StatusCode

TABLE: Final[dict[ErrorCode, StatusRow]] = {
    ErrorCode.INVALID_REQUEST: StatusRow(_G.INVALID_ARGUMENT, 400, "invalid_request_error", False, False),
    ErrorCode.UNKNOWN_MODEL: StatusRow(_G.NOT_FOUND, 404, "invalid_request_error", False, False),
    ErrorCode.REQUEST_TOO_LARGE: StatusRow(_G.RESOURCE_EXHAUSTED, 413, "invalid_request_error", False, False),
    ErrorCode.OVERLOADED: StatusRow(_G.RESOURCE_EXHAUSTED, 429, "rate_limit_error", True, True),
    ErrorCode.DEADLINE_EXCEEDED: StatusRow(_G.DEADLINE_EXCEEDED, 504, "timeout_error", False, False),
    ErrorCode.CANCELLED: StatusRow(_G.CANCELLED, 499, "cancelled_error", False, False),
    ErrorCode.LEASE_GONE: StatusRow(_G.UNAVAILABLE, 503, "server_error", True, True),
    ErrorCode.TRANSFER_FAILED: StatusRow(_G.UNAVAILABLE, 503, "server_error", True, True),
    ErrorCode.REPLICA_LOST: StatusRow(_G.UNAVAILABLE, 503, "server_error", True, True),
    ErrorCode.UNAVAILABLE: StatusRow(_G.UNAVAILABLE, 503, "server_error", True, True),
    ErrorCode.INCOMPATIBLE_PEER: StatusRow(_G.FAILED_PRECONDITION, 500, "server_error", True, False),
    ErrorCode.INTERNAL_BUG: StatusRow(_G.INTERNAL, 500, "server_error", False, False),
    ErrorCode.UNKNOWN_WORKER: StatusRow(_G.NOT_FOUND, 404, "invalid_request_error", False, False),
    ErrorCode.NUMERICAL_ERROR: StatusRow(_G.INTERNAL, 500, "server_error", True, False),
    ErrorCode.WORKER_ID_TAKEN: StatusRow(_G.ALREADY_EXISTS, 409, "server_error", False, False),
    ErrorCode.REQUEST_TIMEOUT: StatusRow(_G.DEADLINE_EXCEEDED, 408, "timeout_error", False, False),
    ErrorCode.KV_CORRUPT: StatusRow(_G.UNAVAILABLE, 503, "server_error", True, True),
    ErrorCode.KV_ROTTED: StatusRow(_G.UNAVAILABLE, 503, "server_error", True, True),
}

_INVALID: Final = {
    cls.code: cls for cls in (errors.InvalidRequest, errors.UnknownModel, errors.RequestTooLarge, errors.UnknownWorker)
}
_PLAIN: Final[dict[ErrorCode, type[PdserveError]]] = {
    cls.code: cls
    for cls in (
        errors.DeadlineExceeded,
        errors.RequestTimeout,
        errors.Cancelled,
        errors.LeaseGone,
        errors.TransferFailed,
        errors.KvCorrupt,
        errors.KvRotted,
        errors.ReplicaLost,
        errors.Unavailable,
        errors.IncompatiblePeer,
        errors.WorkerIdTaken,
        errors.NumericalError,
        errors.InternalBug,
    )
}
CLASSES: Final[dict[ErrorCode, type[PdserveError]]] = {
    **_INVALID,
    **_PLAIN,
    errors.Overloaded.code: errors.Overloaded,
}
"""The class that stands for each code when it comes over the wire."""


def to_reason(code: ErrorCode) -> common_pb2.ErrorReason:
    """The wire enum of a code; total by construction of the names, and tested."""
    return cast(common_pb2.ErrorReason, common_pb2.ErrorReason.Value(f"ERROR_REASON_{code.name}"))


def from_reason(reason: int, message: str) -> PdserveError:
    """The error a peer reported. An unknown reason is our bug, or a newer peer: `InternalBug`."""
    known = common_pb2.ErrorReason.values()
    name = common_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_") if reason in known else ""
    code = ErrorCode.__members__.get(name, ErrorCode.INTERNAL_BUG)
    if code in _INVALID:
        return _INVALID[code](message, field="request")  # a worker names no field of the client's
    if code is ErrorCode.OVERLOADED:
        return errors.Overloaded(message, retry_after_s=DEFAULT_RETRY_AFTER_S)
    return _PLAIN[code](message)


def retry_after_s(error: PdserveError) -> float | None:
    """How long a client should wait before it tries again; None when that does not help."""
    if isinstance(error, errors.Overloaded):
        return error.retry_after_s
    return DEFAULT_RETRY_AFTER_S if TABLE[error.code].client_retries else None


def trailing_metadata(error: PdserveError) -> tuple[tuple[str, str], ...]:
    wait_s = retry_after_s(error)
    waiting = ((RETRY_AFTER_METADATA, f"{wait_s:.3f}"),) if wait_s is not None else ()
    return ((REASON_METADATA, error.code.value), *waiting)


async def abort(context: Any, error: PdserveError, *more: tuple[str, str]) -> None:
    """End a grpc.aio call with the error's status, message and trailing metadata, and `more` of it. Always raises."""
    await context.abort(TABLE[error.code].grpc, error.message, (*trailing_metadata(error), *more))
