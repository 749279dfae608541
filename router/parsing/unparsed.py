"""The name that a client gave a request, read from a message that is too large to be parsed on the loop."""

from __future__ import annotations

from typing import Final

MAX_NAME_BYTES: Final = 128  # no name that is served is longer
_TEXT: Final = 2  # the wire type of a text, which stands behind its length
_LENGTH_BYTES: Final = 4  # of a length, which has seven bits in each


def leading_text(data: bytes, field: int) -> str:
    """Return the text of a field. Empty: it is not set, or does not stand where encoders write it, which is in front of the
    fields with higher numbers. Those with lower numbers must be texts as well."""
    tags = [number << 3 | _TEXT for number in range(1, field + 1)]
    place = 0
    for _ in tags:
        tag = data[place] if place < len(data) else None
        if tag not in tags:
            return ""
        length, place = _length_at(data, place + 1)
        if tag == tags[-1]:
            return data[place : place + min(length, MAX_NAME_BYTES)].decode(errors="replace")
        place += length
    return ""


def _length_at(data: bytes, place: int) -> tuple[int, int]:
    """Return the length that stands in front of a text, and the place behind it."""
    length = 0
    for i, byte in enumerate(data[place : place + _LENGTH_BYTES]):
        length |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return length, place + i + 1
    return 0, len(data)
