"""What a request is called, and who may cancel it: whoever was told its cancel token, when it was admitted.

The router makes the names, so that two clients never mean one request. A connection is no identity, since proxies share
them, and an id is in logs. A token names the router's incarnation and is otherwise a keyed hash of the request's id, so
that no table of tokens has to be kept.
"""

from __future__ import annotations

import hmac
import re
import secrets
from enum import Enum
from typing import Final

from pdserve.core.ids import Incarnation, RequestId

KEY_BYTES: Final = 32  # of HMAC-SHA256, as long as its output
_TOKEN: Final = re.compile("([0-9a-f]{16})-[0-9a-f]{64}")


def new_request_id() -> str:
    """Unique: 128 random bits in 32 characters."""
    return secrets.token_hex(16)


class Claim(Enum):
    VALID = "valid"
    WRONG = "wrong"
    NOT_HERE = "not here"
    """It was given by another router, or by this one before it was started anew."""


class CancelTokens:
    def __init__(self, incarnation: Incarnation, key: bytes) -> None:
        """`key` is secret and drawn anew at each start: `KEY_BYTES` random bytes."""
        self._incarnation = f"{incarnation:016x}"
        self._key = key

    def issue(self, request_id: RequestId) -> str:
        """The cancel token of a request, 81 ASCII characters."""
        return f"{self._incarnation}-{hmac.new(self._key, request_id.encode(), 'sha256').hexdigest()}"

    def check(self, request_id: RequestId, token: str) -> Claim:
        """Whether the token is that of the request, which need not exist. The time that it takes does not depend on how
        much of the token is right."""
        parts = _TOKEN.fullmatch(token)
        if parts is None:
            return Claim.WRONG
        if parts[1] != self._incarnation:
            return Claim.NOT_HERE
        return Claim.VALID if hmac.compare_digest(token, self.issue(request_id)) else Claim.WRONG
