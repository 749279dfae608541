"""Errors on the wire, in both directions. `pdserve.core.error_table` says which status each error has and who retries."""

from __future__ import annotations

from typing import Any, Final, cast

import grpc

from pdserve.core import errors
from pdserve.core.error_table import CLASSES, DEFAULT_RETRY_AFTER_S, TABLE, retry_after_s
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.core.structured.constraint import FIELD
from pdserve.rpc.v1 import common_pb2

REASON_METADATA: Final = "pdserve-error-reason"
RETRY_AFTER_METADATA: Final = "retry-after-s"
TIMELINE_METADATA: Final = "pdserve-timeline"
CLUSTER_TOKEN_METADATA: Final = "pdserve-cluster-token"
REQUEST_ID_METADATA: Final = "pdserve-request-id"
CANCEL_TOKEN_METADATA: Final = "pdserve-cancel-token"
IGNORED_FIELDS_METADATA: Final = "x-pdserve-ignored-fields"  # the name that HTTP has for it
CORRELATION_ID_METADATA: Final = "x-request-id"  # a client's own id of a request; proxies use this name


def to_reason(code: ErrorCode) -> common_pb2.ErrorReason:
    """Return the wire enum of an error code. The names correspond, so every code has one; a test checks it."""
    return cast(common_pb2.ErrorReason, common_pb2.ErrorReason.Value(f"ERROR_REASON_{code.name}"))


def from_reason(reason: int, message: str) -> PdserveError:
    """Return the error that a peer reported. An unknown reason, which a newer peer may send, becomes `InternalBug`."""
    known = common_pb2.ErrorReason.values()
    name = common_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_") if reason in known else ""
    code = ErrorCode.__members__.get(name, ErrorCode.INTERNAL_BUG)
    cls = CLASSES[code]
    if issubclass(cls, errors.InvalidRequest):
        # Of the fields that a worker names, the client knows this one alone.
        return cls(message, field=FIELD if message.startswith(f"{FIELD}: ") else "request")
    if issubclass(cls, errors.Overloaded):
        return cls(message, retry_after_s=DEFAULT_RETRY_AFTER_S)
    return cls(message)


def trailing_metadata(error: PdserveError) -> tuple[tuple[str, str], ...]:
    """Return the metadata that names the error and, where waiting helps, the seconds to wait."""
    wait_s = retry_after_s(error)
    waiting = ((RETRY_AFTER_METADATA, f"{wait_s:.3f}"),) if wait_s is not None else ()
    return ((REASON_METADATA, error.code.value), *waiting)


async def abort(context: Any, error: PdserveError, *more: tuple[str, str]) -> None:
    """End a grpc.aio call with the error's status, message and trailing metadata, to which `more` is added. Always raises."""
    await context.abort(grpc.StatusCode[TABLE[error.code].grpc], error.message, (*trailing_metadata(error), *more))
