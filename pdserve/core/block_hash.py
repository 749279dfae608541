"""Names for the content of full KV blocks: equal hashes mean equal KV. Pure, and knows nothing of pools.

The KV of a block depends on every token before it, so a block's hash covers its parent's:

```
root = H(salt)     hash 0 = H(root, tokens of block 0)     hash i = H(hash i-1, tokens of block i)
```
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NewType

BlockHash = NewType("BlockHash", bytes)

DIGEST_BYTES: Final = 32
"""Prompts come from clients who are not trusted: two that collide would serve one user's KV to another."""


PROMPT_HASH_BYTES: Final = 32


def prompt_hash(prompt_ids: bytes, cache_salt: str) -> bytes:
    """Names a whole prompt with its salt. prompt_ids: little-endian uint32, as it came over the wire."""
    salt = cache_salt.encode(errors="surrogatepass")
    return blake2b(
        struct.pack("<Q", len(salt)) + salt + prompt_ids, digest_size=PROMPT_HASH_BYTES, person=b"pdserve prompt"
    ).digest()


class PrefixChain:
    """The hashes of one growing sequence, each computed once.

    `salt` separates what must never share KV: other weights, another layout, another tenant.
    """

    def __init__(self, block_size: int, *, salt: bytes = b"") -> None:
        assert block_size > 0
        self._block_size = block_size
        self._last = _hash(b"", salt)
        self._hashes: list[BlockHash] = []

    def first(self, count: int, tokens: Sequence[int]) -> list[BlockHash]:
        """Of the first `count` blocks of `tokens`, all full. Tokens that were seen before must not have changed."""
        size = self._block_size
        assert count * size <= len(tokens)
        for start in range(len(self._hashes) * size, count * size, size):
            self._last = _hash(self._last, struct.pack(f"<{size}I", *tokens[start : start + size]))
            self._hashes.append(self._last)
        return self._hashes[:count]


def block_hashes(tokens: Sequence[int], block_size: int, *, salt: bytes = b"") -> tuple[BlockHash, ...]:
    """One hash for each full block of `tokens`, in order; a last block that is not full has none."""
    return tuple(PrefixChain(block_size, salt=salt).first(len(tokens) // block_size, tokens))


def _hash(parent: bytes, content: bytes) -> BlockHash:
    return BlockHash(blake2b(parent + content, digest_size=DIGEST_BYTES).digest())
