"""Errors of calls become the errors that the server raised."""

from __future__ import annotations

from typing import Any, Final

import grpc

from pdserve.client.command_line import explain, wrong_address
from pdserve.client.retries import NoServer
from pdserve.core import errors
from pdserve.core.error_table import CLASSES, DEFAULT_RETRY_AFTER_S
from pdserve.core.errors import ErrorCode, PdserveError
from pdserve.rpc import status

HINT: Final = "is `pdserve up` running there, and is this its gRPC port (50051 unless it is set)?"
_CODES: Final = {code.value: code for code in ErrorCode}
_BARE: Final[dict[grpc.StatusCode, ErrorCode]] = {
    grpc.StatusCode.UNAVAILABLE: ErrorCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INVALID_REQUEST,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.OVERLOADED,
}
"""The error of each status that gRPC itself gives, without a reason of ours."""
_TOO_LARGE: Final = ("message larger than max", "metadata size exceeds", "Metadata too large")
"""What gRPC says of a message or of metadata that will never fit. It gives the same status to a call too many, which may be
made again."""


class Server:
    """The server at the address of a client. A failed call means something else until it has answered once."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.has_answered = False

    def error_of(self, exc: Any) -> PdserveError:
        """Return the error of a failed call. `exc` is the grpc.RpcError, which is also the call."""
        trailing = dict(exc.trailing_metadata() or ())
        reason = trailing.get(status.REASON_METADATA)
        if reason is None and exc.code() is grpc.StatusCode.CANCELLED:  # a cancel by a client has a reason, or is known to it
            return errors.Unavailable(f"the server at {self.address} ended the call: it stops")
        if reason is None:
            message = explain(exc, self.address, HINT).message
            if not self.has_answered and wrong_address(exc, self.address) is not None:
                return NoServer(message)
            code = _BARE.get(exc.code(), ErrorCode.INTERNAL_BUG)
            if code is ErrorCode.OVERLOADED and any(sign in (exc.details() or "") for sign in _TOO_LARGE):
                code = ErrorCode.REQUEST_TOO_LARGE
            return _made(code, message, None)
        self.has_answered = True
        code = _CODES.get(str(reason), ErrorCode.INTERNAL_BUG)
        wait_s = _seconds(trailing.get(status.RETRY_AFTER_METADATA))
        return _made(code, " ".join((exc.details() or "no details").split()), wait_s)


def broken_stream() -> PdserveError:
    """Return the error of a stream that ended without an error before the answer did. No server of ours does that."""
    return errors.Unavailable("the stream ended before the answer did")


def closed_client() -> PdserveError:
    """Return the error of a call on a client that its program has closed. It is never tried again."""
    return errors.Unavailable("this client is closed")


def _made(code: ErrorCode, message: str, wait_s: float | None) -> PdserveError:
    kind = CLASSES[code]
    if issubclass(kind, errors.InvalidRequest):
        field, colon, _ = message.partition(": ")
        return kind(message, field=field if colon and " " not in field else "request")
    if issubclass(kind, errors.Overloaded):
        return kind(message, retry_after_s=DEFAULT_RETRY_AFTER_S if wait_s is None else wait_s)
    return kind(message)


def _seconds(text: Any) -> float | None:
    try:
        return max(0.0, float(text))
    except (TypeError, ValueError):
        return None
