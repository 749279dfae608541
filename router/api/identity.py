"""The names of requests, and the right to cancel one. A client may cancel a request if it was told the request's cancel token.

The router makes the request ids, so two clients never mean the same request by mistake. A connection does not identify a
client, because proxies share connections, and an id does not prove anything, because ids are in logs. A token names the
router's incarnation and holds a keyed hash of the request's id, so no table of tokens has to be kept.
"""

from __future__ import annotations

import hmac
import re
import secrets
from enum import Enum
from typing import Final

from pdserve.core.ids import Incarnation, RequestId
from pdserve.core.sampling import SEED_LIMIT

KEY_BYTES: Final = 32  # HMAC-SHA256 gets a key as long as its output
_TOKEN: Final = re.compile("([0-9a-f]{16})-[0-9a-f]{64}")


def new_request_id() -> str:
    """Return a unique id: 128 random bits in 32 hexadecimal characters."""
    return secrets.token_hex(16)


def draw_seed() -> int:
    """Return a seed for a client that gave none."""
    return secrets.randbelow(SEED_LIMIT)


class Claim(Enum):
    """The result of a check of a cancel token."""

    VALID = "valid"
    WRONG = "wrong"
    NOT_HERE = "not here"
    """Another router gave the token, or this one gave it before its last start."""


class CancelTokens:
    """Issues and checks the cancel tokens of one router process."""

    def __init__(self, incarnation: Incarnation, key: bytes) -> None:
        """`key` is `KEY_BYTES` random bytes. It is secret and is drawn anew at each start."""
        self._incarnation = f"{incarnation:016x}"
        self._key = key

    def issue(self, request_id: RequestId) -> str:
        """Return the cancel token of a request, 81 ASCII characters."""
        return f"{self._incarnation}-{hmac.new(self._key, request_id.encode(), 'sha256').hexdigest()}"

    def check(self, request_id: RequestId, token: str) -> Claim:
        """Check that the token is that of the request, which need not exist. The time that this takes does not depend on how
        much of the token is right."""
        parts = _TOKEN.fullmatch(token)
        if parts is None:
            return Claim.WRONG
        if parts[1] != self._incarnation:
            return Claim.NOT_HERE
        return Claim.VALID if hmac.compare_digest(token, self.issue(request_id)) else Claim.WRONG
