"""The names of requests, and the right to cancel one. A client may cancel a request if it was told the request's cancel token.

The router makes the request ids, so two clients never mean the same request by mistake. A connection does not identify a
client, because proxies share connections, and an id does not prove anything, because ids are in logs. A token names the
router's incarnation and holds a keyed hash of the request's id, so no table of tokens has to be kept.

Turns between clients are fair by the names of the client, of its connection and of its call. Such a name is a keyed digest, so
neither logs nor recordings tell addresses or API keys. Names prove nothing: whoever can send from many addresses, or invent API
keys that nobody checks, is many clients.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from enum import Enum
from functools import lru_cache
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


DIGEST_BYTES: Final = 8
_PEER: Final = re.compile(r"(?:ipv4:([^:]+)|ipv6:(?:\[|%5B)(.+?)(?:\]|%5D)):\d+")
_IPV6_NETWORK_BITS: Final = 64  # the smallest network that sites get: whoever has one address of it has them all


class ClientNames:
    """Makes the names of one router process."""

    def __init__(self, fairness_key: str, key: bytes) -> None:
        """`fairness_key` is the setting. `key` is secret and is drawn anew at each start."""
        self._key = key
        self._by_connection = fairness_key == "connection"
        named = "authorization" if fairness_key == "api_key" else fairness_key.partition(":")[2]
        self.header: Final = named.lower()
        """The name of the header that tells clients apart, in lower case. Empty: no header does."""
        self._is_key = fairness_key == "api_key"

    def of(self, address: str, connection: str, shown: str | None) -> tuple[str, str, str]:
        """Return the names of a new call. `connection` names it among those that are open. `shown` is the value of `header`;
        None and empty: the client sent none."""
        call = new_request_id()
        if shown and self.header:
            return self._digest(f"header {_key_of(shown) if self._is_key else shown}"), "", call
        if self._by_connection:
            return self._digest(f"connection {connection}"), "", call
        return self._digest(f"address {_network(address)}"), self._digest(f"connection {connection}"), call

    def of_peer(self, peer: str, shown: str | None) -> tuple[str, str, str]:
        """Return the names of a new call of gRPC, whose `peer` is such as `ipv4:10.0.0.7:4711`."""
        match = _PEER.fullmatch(peer)
        return self.of((match[1] or match[2]) if match else peer, peer, shown)

    def _digest(self, text: str) -> str:
        return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES, key=self._key).hexdigest()


def _key_of(shown: str) -> str:
    """Return a key as all servers read it: the case of the scheme and further spaces mean nothing."""
    scheme, _, key = shown.strip().partition(" ")
    return f"{scheme.lower()} {key.strip()}" if key else scheme


@lru_cache(maxsize=4096)
def number_of(names: tuple[str, ...]) -> int:
    """Return the number by which workers know a client's connection. 0: the client is not known."""
    return int.from_bytes(hashlib.blake2b("\n".join(names).encode(), digest_size=DIGEST_BYTES).digest()) if names else 0


@lru_cache(maxsize=4096)
def _network(address: str) -> str:
    """Return the address, or of IPv6 its network. What is no address stays as it is."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if found.version == 4:
        return str(found)
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or ipaddress.ip_network((int(found), _IPV6_NETWORK_BITS), strict=False))
