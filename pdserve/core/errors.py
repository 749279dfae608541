"""The errors of pdserve. A class says what the caller should do; ids and limits are attributes.

Every class has one `ErrorCode`; `pdserve.core.error_table` says what each code means on gRPC and HTTP.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

MAX_MESSAGE_CHARS: Final = 500
"""Of what is quoted back to a client: four bytes a character, percent-encoded, stay under gRPC's 8 KiB of metadata."""


class ErrorCode(Enum):
    """Why a request failed, for programs. The values are the wire names of `ErrorReason` without prefix."""

    INVALID_REQUEST = "invalid_request"
    UNKNOWN_MODEL = "unknown_model"
    REQUEST_TOO_LARGE = "request_too_large"
    OVERLOADED = "overloaded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    LEASE_GONE = "lease_gone"
    TRANSFER_FAILED = "transfer_failed"
    REPLICA_LOST = "replica_lost"
    UNAVAILABLE = "unavailable"
    INCOMPATIBLE_PEER = "incompatible_peer"
    INTERNAL_BUG = "internal_bug"
    UNKNOWN_WORKER = "unknown_worker"
    WORKER_ID_TAKEN = "worker_id_taken"
    NUMERICAL_ERROR = "numerical_error"
    REQUEST_TIMEOUT = "request_timeout"
    KV_CORRUPT = "kv_corrupt"
    KV_ROTTED = "kv_rotted"


class PdserveError(Exception):
    """Base of all. `code` is a class attribute; use a subclass."""

    code: ErrorCode = ErrorCode.INTERNAL_BUG

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(PdserveError):
    """The client must change the request. `field` is the offending field's name as the client wrote it."""

    code = ErrorCode.INVALID_REQUEST

    def __init__(self, message: str, *, field: str) -> None:
        named = message if message.startswith(field) else f"{field}: {message}"
        super().__init__(named if len(named) <= MAX_MESSAGE_CHARS else named[: MAX_MESSAGE_CHARS - 3] + "...")
        self.field = field


class UnknownModel(InvalidRequest):
    """The client asked for a model that is not served here."""

    code = ErrorCode.UNKNOWN_MODEL


class UnknownWorker(InvalidRequest):
    """An operator named a worker that is not linked to this router."""

    code = ErrorCode.UNKNOWN_WORKER


class RequestTooLarge(InvalidRequest):
    """The body is over the byte limit."""

    code = ErrorCode.REQUEST_TOO_LARGE


class RequestTimeout(PdserveError):
    """The client sent its request too slowly, or stopped in the middle."""

    code = ErrorCode.REQUEST_TIMEOUT


class Overloaded(PdserveError):
    """A bounded queue is full. Retry after `retry_after_s`."""

    code = ErrorCode.OVERLOADED

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(PdserveError):
    """The request's deadline passed before it finished."""

    code = ErrorCode.DEADLINE_EXCEEDED


class Cancelled(PdserveError):
    """The client left or cancelled."""

    code = ErrorCode.CANCELLED


class LeaseGone(PdserveError):
    """The prefill worker no longer held the lease: what was read must be discarded. Retry."""

    code = ErrorCode.LEASE_GONE


class TransferFailed(PdserveError):
    """A KV read failed or ran past its deadline. Retry, on another pair if there is one."""

    code = ErrorCode.TRANSFER_FAILED


class KvCorrupt(PdserveError):
    """KV was not read as it was written, and the lender's memory still holds what was written. Retry, on another pair."""

    code = ErrorCode.KV_CORRUPT


class KvRotted(PdserveError):
    """KV was not read as it was written, and it has changed in the lender's memory, or nobody knows where. Retry."""

    code = ErrorCode.KV_ROTTED


class ReplicaLost(PdserveError):
    """A worker that served the request is gone. Retry."""

    code = ErrorCode.REPLICA_LOST


class Unavailable(PdserveError):
    """No worker that could serve the request is ready. Retry later."""

    code = ErrorCode.UNAVAILABLE


class IncompatiblePeer(PdserveError):
    """Two workers' KV layouts or versions differ; they must never be paired. An operator must act."""

    code = ErrorCode.INCOMPATIBLE_PEER


class NumericalError(PdserveError):
    """The model's logits were not finite numbers, so no token could be drawn. The cluster computes the request once more."""

    code = ErrorCode.NUMERICAL_ERROR


class WorkerIdTaken(PdserveError):
    """Another live worker has this worker_id, and keeps it. An operator must give one of the two another id or end it."""

    code = ErrorCode.WORKER_ID_TAKEN


class InternalBug(PdserveError):
    """Our own mistake, with all that is needed to find it in the message."""

    code = ErrorCode.INTERNAL_BUG


class OutOfMemory(InternalBug):
    """A step got no memory. What all steps may need is measured, checked and taken at the start, so either another
    process took what was promised or a bound is wrong. The worker ends and is started again; its requests go elsewhere."""


class OutOfThreads(InternalBug):
    """A step got no thread of the system: it allows this process no more of them, or no memory for one's stack. Threads are
    made by a worker's first step, before it serves anybody; a later step makes none."""


class IllegalTransition(InternalBug):
    """A state machine got an event that its state does not know. `history` holds its last events."""

    def __init__(self, machine: str, state: str, event: str, history: tuple[str, ...]) -> None:
        super().__init__(f"{machine}: {event} is illegal in {state}; history: {' -> '.join(history) or '(empty)'}")
        self.state = state
        self.event = event
        self.history = history


class ConfigError(PdserveError):
    """A setting is wrong; the message names it and says what to do."""

    code = ErrorCode.INVALID_REQUEST
