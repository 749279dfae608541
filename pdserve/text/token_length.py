"""A lower bound of the tokens of a text, so that one that is far too long is refused without encoding it.

A text of n characters becomes at least n symbols: a character is one symbol, or one for each of its bytes. A token is made of
at most as many symbols as its spelling has. So the longest spelling bounds the tokens of a text from below, unless something
leaves characters out or joins them before they become symbols. What may do so is not guessed: only parts of tokenizers are
taken of which it is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import tokenizers

from pdserve.text.token_bytes import BYTES

NFC_CHARS: Final = 4
"""So many characters become one by composition at most: none has a longer canonical decomposition (UAX #15, section 12.1)."""
_KEEPING: Final = ("ByteLevel", "Digits", "Metaspace")


class TokenBound:
    """The bound of one tokenizer. Immutable."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._left_out = _left_out(backend)
        spelled = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
        self._chars_per_token = spelled * (_joined(_spec(backend.normalizer)) or 1)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that a text has at least. 0: nothing is known. A megabyte takes less than a millisecond."""
        if self._left_out is None:
            return 0
        kept = len(text) - sum(text.count(char) for char in self._left_out)
        return -(-kept // self._chars_per_token)


def _left_out(backend: tokenizers.Tokenizer) -> str | None:
    """Return the characters that a tokenizer leaves out. None: it is not known which."""
    model, vocab, pieces = backend.model, backend.get_vocab(with_added_tokens=False), _spec(backend.pre_tokenizer)
    if not isinstance(model, tokenizers.models.BPE) or _joined(_spec(backend.normalizer)) is None or not _keeps(pieces):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # such a token takes any number of spaces beside it
    if "ByteLevel" in _types(pieces):
        missing = {byte for symbol, byte in BYTES.items() if symbol not in vocab}
    elif model.byte_fallback:
        missing = {byte for byte in range(256) if f"<0x{byte:02X}>" not in vocab}
    else:
        return None  # characters outside of the vocabulary are left out, or become one token together
    if any(0x80 <= byte < 0xC0 for byte in missing):
        return None
    # Each character beyond ASCII has a byte from 0x80 to 0xBF, and leaves at least that one.
    return "".join(chr(byte) for byte in sorted(missing) if byte < 0x80)


def _spec(part: Any) -> Mapping[str, Any] | None:
    """Return a part of a tokenizer as tokenizer.json writes it. None: the tokenizer lacks it."""
    found: Mapping[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return found


def _joined(normalizer: Mapping[str, Any] | None) -> int | None:
    """Return how many characters a normalizer makes one of at most. None: it is not known."""
    if normalizer is None:
        return 1
    match normalizer:
        case {"type": "NFC"}:
            return NFC_CHARS
        case {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(old) == 1 and new:
            return 1
        case {"type": "Sequence", "normalizers": list(steps)}:
            product = 1
            for step in steps:
                joined = _joined(step)
                if joined is None:
                    return None
                product *= joined
            return product
    return None


def _keeps(pieces: Mapping[str, Any] | None) -> bool:
    """Tell whether a pre-tokenizer leaves no character out."""
    match pieces:
        case None:
            return True
        case {"type": "Sequence", "pretokenizers": list(steps)}:
            return all(map(_keeps, steps))
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": str(kind)}:
            return kind in _KEEPING
    return False


def _types(pieces: Mapping[str, Any] | None) -> list[str]:
    if pieces is None:
        return []
    return [pieces["type"], *(kind for step in pieces.get("pretokenizers", ()) for kind in _types(step))]
