"""The errors of pdserve. The class says what the caller should do; the attributes hold ids and limits.

Every class has one `ErrorCode`; `pdserve.core.error_table` says what each code means on gRPC and HTTP.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

MAX_MESSAGE_CHARS: Final = 500
"""The longest message that is quoted back to a client. Each character may have four bytes, which gRPC percent-encodes; the
message must stay under gRPC's 8 KiB of metadata."""


class ErrorCode(Enum):
    """The reason why a request failed, for programs. The values are the wire names of `ErrorReason` without their prefix."""

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
    UNKNOWN_REQUEST = "unknown_request"
    STALE_ORDER = "stale_order"
    CANNOT_FLIP = "cannot_flip"
    CANNOT_DRAIN = "cannot_drain"
    POISON_REQUEST = "poison_request"


class PdserveError(Exception):
    """The base class of all errors here. `code` is a class attribute; raise a subclass."""

    code: ErrorCode = ErrorCode.INTERNAL_BUG

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidRequest(PdserveError):
    """The client must change the request. `field` is the name of the wrong field as the client wrote it."""

    code = ErrorCode.INVALID_REQUEST

    def __init__(self, message: str, *, field: str) -> None:
        named = message if message.startswith(field) else f"{field}: {message}"
        super().__init__(named if len(named) <= MAX_MESSAGE_CHARS else named[: MAX_MESSAGE_CHARS - 3] + "...")
        self.field = field


class ContextOverflow(InvalidRequest):
    """Prompt and output together are longer than the model's context.

    The message begins with the words of OpenAI and vLLM, and has Anthropic's "prompt is too long": frameworks look for either
    text before they shorten a chat or turn to another model.
    """

    @classmethod
    def of_prompt(cls, size: str, max_model_len: int, *, field: str) -> ContextOverflow:
        """Return the error of a prompt. `size` gives its length in words. One token of output needs room, too."""
        name = field.partition("[")[0]
        return cls(
            f"This model's maximum context length is {max_model_len} tokens. However, your {name} resulted in {size}. "
            f"The prompt is too long: please reduce the length of the {name} to at most {max_model_len - 1} tokens "
            "(max_model_len).",
            field=field,
        )

    @classmethod
    def of_output(cls, max_tokens: int, prompt_tokens: int, max_model_len: int, *, prompt: str) -> ContextOverflow:
        """Return the error of too large an output behind a prompt that fits. `prompt` is the name of the prompt's field."""
        return cls(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested "
            f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the {prompt}, {max_tokens} in the completion). The "
            f"prompt is too long for that: please reduce the length of the {prompt} or completion. At most "
            f"{max_model_len - prompt_tokens} tokens can follow (max_model_len).",
            field="max_tokens",
        )


class UnknownModel(InvalidRequest):
    """The client asked for a model that is not served here."""

    code = ErrorCode.UNKNOWN_MODEL


class UnknownWorker(InvalidRequest):
    """An operator named a worker that is not linked to this router."""

    code = ErrorCode.UNKNOWN_WORKER


class CannotFlip(InvalidRequest):
    """The worker cannot take the other role now. The message names the obstacle; another worker may be able to."""

    code = ErrorCode.CANNOT_FLIP


class CannotDrain(InvalidRequest):
    """The worker is the last serving worker of its role. An operator starts another one first, or forces the drain."""

    code = ErrorCode.CANNOT_DRAIN


class UnknownRequest(InvalidRequest):
    """An operator named a request of which this router keeps no story."""

    code = ErrorCode.UNKNOWN_REQUEST


class RequestTooLarge(InvalidRequest):
    """The body of the request, or the answer that is gathered for it, has more bytes than the limit allows."""

    code = ErrorCode.REQUEST_TOO_LARGE


class RequestTimeout(PdserveError):
    """The client sent its request too slowly, or stopped before its end."""

    code = ErrorCode.REQUEST_TIMEOUT


class Overloaded(PdserveError):
    """A bounded queue is full, or the first token would be later than the target of its class. Retry after `retry_after_s`."""

    code = ErrorCode.OVERLOADED

    def __init__(self, message: str, *, retry_after_s: float, reason: str = "") -> None:
        """`reason` names the decision to refuse the request, for metrics. Empty: the whole queue was full."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.reason = reason


class DeadlineExceeded(PdserveError):
    """The request's deadline passed before it finished."""

    code = ErrorCode.DEADLINE_EXCEEDED


class Cancelled(PdserveError):
    """The client disconnected or cancelled the request."""

    code = ErrorCode.CANCELLED


class LeaseGone(PdserveError):
    """The prefill worker no longer held the lease, so the KV that was read must be discarded. Retry."""

    code = ErrorCode.LEASE_GONE


class TransferFailed(PdserveError):
    """A KV read failed or ran past its deadline. Retry, on another pair if there is one."""

    code = ErrorCode.TRANSFER_FAILED


class KvCorrupt(PdserveError):
    """The KV that was read differs from the KV that was written, which the lender still holds. Retry, on another pair."""

    code = ErrorCode.KV_CORRUPT


class KvRotted(PdserveError):
    """The KV that was read differs from the KV that was written. It has changed in the lender's memory, or the place of the
    change is unknown. Retry."""

    code = ErrorCode.KV_ROTTED


class ReplicaLost(PdserveError):
    """A worker that served the request is gone. Retry."""

    code = ErrorCode.REPLICA_LOST


class Unavailable(PdserveError):
    """No worker that could serve the request is ready. Retry later."""

    code = ErrorCode.UNAVAILABLE


class RouterStopping(Unavailable):
    """The router ends. Retry, over another connection: another router may answer there."""


class IncompatiblePeer(PdserveError):
    """Two workers' KV layouts or versions differ; they must never be paired. An operator must act."""

    code = ErrorCode.INCOMPATIBLE_PEER


class NumericalError(PdserveError):
    """The model's logits were not finite numbers, so no token could be drawn. The cluster computes the request once more."""

    code = ErrorCode.NUMERICAL_ERROR


class PoisonRequest(PdserveError):
    """Several workers died while they computed the request, the last one while it computed nothing else. Do not retry: the
    request would probably end more workers."""

    code = ErrorCode.POISON_REQUEST


class WorkerIdTaken(PdserveError):
    """Another live worker has this worker_id and keeps it. An operator must end one of the two workers, or give it another
    id."""

    code = ErrorCode.WORKER_ID_TAKEN


class StaleOrder(PdserveError):
    """The order was made for a state that has ended: the term of another actuator, or an earlier incarnation of a worker.
    The sender of the order reads the present state and decides anew."""

    code = ErrorCode.STALE_ORDER


class InternalBug(PdserveError):
    """A mistake in pdserve itself. The message has all that is needed to find it."""

    code = ErrorCode.INTERNAL_BUG


class OutOfMemory(InternalBug):
    """A step got no memory. The worker measures, checks and takes the memory of all steps at its start, so either another
    process took that memory or a bound is wrong. The worker ends and is started again; its requests go elsewhere."""


class OutOfThreads(InternalBug):
    """A step could not start a thread: the system allows this process no more threads, or no memory for the stack of one.
    A worker's first step makes all threads, before the worker serves anybody; a later step makes none."""


class IllegalTransition(InternalBug):
    """A state machine got an event for which its state has no transition. `history` holds its last events."""

    def __init__(self, machine: str, state: str, event: str, history: tuple[str, ...]) -> None:
        super().__init__(f"{machine}: {event} is illegal in {state}; history: {' -> '.join(history) or '(empty)'}")
        self.state = state
        self.event = event
        self.history = history


class ConfigError(PdserveError):
    """A setting is wrong. The message names the setting and says what to do."""

    code = ErrorCode.INVALID_REQUEST
