"""The one table of errors: it says what each error code means on gRPC and HTTP, and who tries the request again. Pure.

`pdserve.rpc.status` puts an error on the wire and reads it back; `docs/errors.md` is generated from the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.core import errors
from pdserve.core.errors import ErrorCode, PdserveError

DEFAULT_RETRY_AFTER_S: Final = 1.0
"""A client waits so long when waiting helps and the error does not say how long. A lost worker is noticed, or is back, about
then."""


@dataclass(frozen=True, slots=True)
class StatusRow:
    """One row of the table: what one error code means on the wire."""

    grpc: str
    """The name of the gRPC status, as in `grpc.StatusCode`. It is a string because this module must not load grpc."""
    http: int
    openai_type: str
    cluster_retries: bool
    """True when the router tries a request again, elsewhere or later, which a worker has ended with this error."""
    client_retries: bool
    """True when the same request may succeed later for a client that has got this error."""


TABLE: Final[dict[ErrorCode, StatusRow]] = {
    ErrorCode.INVALID_REQUEST: StatusRow("INVALID_ARGUMENT", 400, "invalid_request_error", False, False),
    ErrorCode.UNKNOWN_MODEL: StatusRow("NOT_FOUND", 404, "invalid_request_error", False, False),
    ErrorCode.REQUEST_TOO_LARGE: StatusRow("RESOURCE_EXHAUSTED", 413, "invalid_request_error", False, False),
    ErrorCode.OVERLOADED: StatusRow("RESOURCE_EXHAUSTED", 429, "rate_limit_error", True, True),
    ErrorCode.DEADLINE_EXCEEDED: StatusRow("DEADLINE_EXCEEDED", 504, "timeout_error", False, False),
    ErrorCode.CANCELLED: StatusRow("CANCELLED", 499, "cancelled_error", False, False),
    ErrorCode.LEASE_GONE: StatusRow("UNAVAILABLE", 503, "server_error", True, True),
    ErrorCode.TRANSFER_FAILED: StatusRow("UNAVAILABLE", 503, "server_error", True, True),
    ErrorCode.REPLICA_LOST: StatusRow("UNAVAILABLE", 503, "server_error", True, True),
    ErrorCode.UNAVAILABLE: StatusRow("UNAVAILABLE", 503, "server_error", True, True),
    ErrorCode.INCOMPATIBLE_PEER: StatusRow("FAILED_PRECONDITION", 500, "server_error", True, False),
    ErrorCode.INTERNAL_BUG: StatusRow("INTERNAL", 500, "server_error", True, False),
    ErrorCode.UNKNOWN_WORKER: StatusRow("NOT_FOUND", 404, "invalid_request_error", False, False),
    ErrorCode.UNKNOWN_REQUEST: StatusRow("NOT_FOUND", 404, "invalid_request_error", False, False),
    ErrorCode.NUMERICAL_ERROR: StatusRow("INTERNAL", 500, "server_error", True, False),
    ErrorCode.WORKER_ID_TAKEN: StatusRow("ALREADY_EXISTS", 409, "server_error", False, False),
    ErrorCode.STALE_ORDER: StatusRow("FAILED_PRECONDITION", 409, "server_error", False, False),
    ErrorCode.CANNOT_FLIP: StatusRow("FAILED_PRECONDITION", 409, "invalid_request_error", False, False),
    ErrorCode.CANNOT_DRAIN: StatusRow("FAILED_PRECONDITION", 409, "invalid_request_error", False, False),
    ErrorCode.POISON_REQUEST: StatusRow("INTERNAL", 500, "server_error", False, False),
    ErrorCode.REQUEST_TIMEOUT: StatusRow("DEADLINE_EXCEEDED", 408, "timeout_error", False, False),
    ErrorCode.KV_CORRUPT: StatusRow("UNAVAILABLE", 503, "server_error", True, True),
    ErrorCode.KV_ROTTED: StatusRow("UNAVAILABLE", 503, "server_error", True, True),
}

CLASSES: Final[dict[ErrorCode, type[PdserveError]]] = {
    cls.code: cls
    for cls in (
        errors.InvalidRequest,
        errors.UnknownModel,
        errors.RequestTooLarge,
        errors.UnknownWorker,
        errors.UnknownRequest,
        errors.Overloaded,
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
        errors.StaleOrder,
        errors.CannotFlip,
        errors.CannotDrain,
        errors.PoisonRequest,
        errors.NumericalError,
        errors.InternalBug,
    )
}
"""The class of the error that is raised for each code when the code comes over the wire."""


def retry_after_s(error: PdserveError) -> float | None:
    """Return how long a client should wait before it tries again, in seconds. None: trying again does not help."""
    if isinstance(error, errors.Overloaded):
        return error.retry_after_s
    return DEFAULT_RETRY_AFTER_S if TABLE[error.code].client_retries else None
