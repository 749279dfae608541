"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import math
from typing import Any, Final

from pdserve.core.error_table import TABLE, retry_after_s
from pdserve.core.errors import ContextOverflow, ErrorCode, InvalidRequest, PdserveError, RouterStopping

_OPENAI_CODES: Final = {ErrorCode.UNKNOWN_MODEL: "model_not_found"}
"""Clients match on the codes that OpenAI itself has. For other errors our own codes say more."""
_OVERFLOW_CODE: Final = "context_length_exceeded"
"""OpenAI's code of a `ContextOverflow`, which is an `invalid_request` here."""


def encode_json(payload: Any) -> bytes:
    """Return compact ASCII JSON. Anything that a client wrote can be quoted in it without an encoding error."""
    return json.dumps(payload, separators=(",", ":"), allow_nan=False).encode()


def error_payload(error: PdserveError) -> dict[str, Any]:
    """Return the error in OpenAI's shape. `param` is the field of an `InvalidRequest`, else null."""
    param = error.field if isinstance(error, InvalidRequest) else None
    code = _OVERFLOW_CODE if isinstance(error, ContextOverflow) else _OPENAI_CODES.get(error.code, error.code.value)
    return {"error": {"message": error.message, "type": TABLE[error.code].openai_type, "param": param, "code": code}}


def error_headers(error: PdserveError) -> list[tuple[bytes, bytes]]:
    """Return Retry-After where waiting helps. OpenAI's clients repeat every other 5xx by themselves, so those get
    x-should-retry: false. A router that ends closes the connection, so that the next try goes elsewhere."""
    row = TABLE[error.code]
    wait_s = retry_after_s(error)
    if wait_s is not None:
        close = [(b"connection", b"close")] if isinstance(error, RouterStopping) else []
        return [(b"retry-after", str(max(1, math.ceil(wait_s))).encode()), *close]
    return [(b"x-should-retry", b"false")] if row.http >= 500 else []
