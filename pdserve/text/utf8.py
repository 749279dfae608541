"""Bytes to text, as they come: a character is given out when its last byte is there."""

from __future__ import annotations

import codecs
from typing import Final

_new_decoder: Final = codecs.getincrementaldecoder("utf-8")


class Utf8Stream:
    """What is not UTF-8 becomes U+FFFD, as many as decoding all bytes at once would give."""

    def __init__(self, *, strip_leading_space: bool = False) -> None:
        self._decoder = _new_decoder("replace")
        self._strip = strip_leading_space

    def push(self, data: bytes) -> str:
        """The characters that are complete now. At most three bytes are held back."""
        return self._stripped(self._decoder.decode(data))

    def flush(self) -> str:
        """The bytes still held, incomplete, become U+FFFD."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text
