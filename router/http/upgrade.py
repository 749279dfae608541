"""Removes from a request its offer to go on in another protocol, as RFC 9110 section 7.8 allows.

httptools treats every offer as accepted and stops at the head, whether a body follows or not. Java's HttpClient and `curl
--http2` offer HTTP/2 with each first request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_OFFER: Final = {b"upgrade", b"http2-settings"}  # names of headers and options of Connection; they concern this hop alone


def declined(method: bytes, url: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the head without the offer. Names in `headers` are in lower case, and values hold no line ends, since the head was
    parsed before."""
    lines = [b"%s %s HTTP/%s" % (method, url, version.encode())]
    for name, value in headers:
        if name == b"connection":
            options = [option.strip() for option in value.split(b",")]
            value = b", ".join(option for option in options if option.lower() not in _OFFER)
        if name not in _OFFER and (value or name != b"connection"):
            lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])
