"""The bytes that each token adds to the text.

Both kinds of tokenizer that Llama-family models have can be decoded token by token. So the bytes of a request's text are
the bytes of its tokens, one after the other, and detokenising costs a list lookup. Two kinds of decoder are known:

- ByteLevel: each character of a token stands for one byte, by GPT-2's table.
- Replace, ByteFallback, Fuse, Strip (Llama 2): "▁" is a space, "<0xE2>" is a byte, and one leading space is dropped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pdserve.core.errors import ConfigError

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """The decoder of a tokenizer: `to_bytes(token)`. `strip_leading_space` drops a space at the beginning of a text."""

    to_bytes: Callable[[str], bytes]
    strip_leading_space: bool


def read_decoder(spec: Mapping[str, Any] | None) -> TokenDecoder:
    """Read the `decoder` of tokenizer.json. Raises `ConfigError` for a decoder that is not known."""
    if spec is not None and spec.get("type") == "ByteLevel":
        return TokenDecoder(_byte_level, strip_leading_space=False)
    if spec is not None and spec.get("type") == "Sequence":
        decoder = _byte_fallback(spec["decoders"])
        if decoder is not None:
            return decoder
    raise ConfigError(f"the tokenizer's decoder is not supported: {spec}; supported: ByteLevel, ByteFallback sequences")


def _byte_fallback(steps: list[dict[str, Any]]) -> TokenDecoder | None:
    """Read the sequence of steps that Llama 2's tokenizer has, whose last step may be missing. None: another sequence."""
    if [step["type"] for step in steps[:3]] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    replace, rest = steps[0], steps[3:]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if "String" not in replace["pattern"] or rest not in ([], [strip]):
        return None
    old, new = replace["pattern"]["String"], replace["content"]

    def to_bytes(token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.replace(old, new).encode()

    return TokenDecoder(to_bytes, strip_leading_space=bool(rest))


def _gpt2_table() -> dict[str, int]:
    """Return the byte of each character. Printing bytes have their own character; the others have those from 256 on."""
    printing = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    table = {chr(byte): byte for byte in printing}
    others = [byte for byte in range(256) if byte not in table.values()]
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTES: Final = _gpt2_table()
"""The byte that each character of GPT-2's table stands for."""
_OUTSIDE: Final = "\uffff"  # stands for characters of Latin-1 that the table lacks, which would otherwise pass for bytes
_TO_LATIN1: Final = {ord(char): chr(byte) for char, byte in BYTES.items()}
_TO_LATIN1.update({byte: _OUTSIDE for byte in range(256) if byte not in _TO_LATIN1})


def _byte_level(token: str) -> bytes:
    """Return the bytes of a token. A token with a character outside the table, which only added tokens have, is plain
    text."""
    try:
        return token.translate(_TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
