"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
import math
from typing import Any, Final

from pdserve.core.error_table import TABLE, retry_after_s
from pdserve.core.errors import ErrorCode, InvalidRequest, PdserveError

_OPENAI_CODES: Final = {ErrorCode.UNKNOWN_MODEL: "model_not_found"}
"""Where OpenAI has a code of its own, clients match on it; elsewhere ours says more."""


def encode_json(payload: Any) -> bytes:
    """Compact and ASCII only: whatever a client wrote can be quoted back without failing to encode."""
    return json.dumps(payload, separators=(",", ":"), allow_nan=False).encode()


def error_payload(error: PdserveError) -> dict[str, Any]:
    param = error.field if isinstance(error, InvalidRequest) else None
    code = _OPENAI_CODES.get(error.code, error.code.value)
    return {"error": {"message": error.message, "type": TABLE[error.code].openai_type, "param": param, "code": code}}


def error_headers(error: PdserveError) -> list[tuple[bytes, bytes]]:
    """Retry-After where waiting helps. OpenAI's clients repeat every 5xx by themselves unless told not to."""
    row = TABLE[error.code]
    wait_s = retry_after_s(error)
    if wait_s is not None:
        return [(b"retry-after", str(max(1, math.ceil(wait_s))).encode())]
    return [(b"x-should-retry", b"false")] if row.http >= 500 else []
