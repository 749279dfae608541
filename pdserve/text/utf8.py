"""Bytes to text, piece by piece: a character is given out when its last byte has come."""

from __future__ import annotations

import codecs
from typing import Final

_new_decoder: Final = codecs.getincrementaldecoder("utf-8")


class Utf8Stream:
    """A decoder of UTF-8 that comes in pieces. Invalid bytes become U+FFFD, exactly as if all bytes were decoded at once."""

    def __init__(self, *, strip_leading_space: bool = False) -> None:
        self._decoder = _new_decoder("replace")
        self._strip = strip_leading_space

    def push(self, data: bytes) -> str:
        """Add bytes and return the characters that are complete now. At most three bytes are held back."""
        return self._stripped(self._decoder.decode(data))

    def flush(self) -> str:
        """End the text. The bytes that are held back are an incomplete character and become U+FFFD."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
