"""Hashes that name the content of full KV blocks: equal hashes mean equal KV. The module is pure and knows no pools.

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
"""A digest of this length makes a collision infeasible. Prompts come from clients who are not trusted, and two prompts with
the same hash would serve one user's KV to another."""


PROMPT_HASH_BYTES: Final = 32


def chain_salt(model_salt: bytes, cache_salt: str) -> bytes:
    """Return the salt of a sequence's chain. `model_salt` names the weights. Only equal `cache_salt`s share blocks."""
    return model_salt + cache_salt.encode(errors="replace")


def prompt_hash(prompt_ids: bytes, cache_salt: str) -> bytes:
    """Return the hash that names a whole prompt with its salt. `prompt_ids` are little-endian uint32, as on the wire."""
    salt = cache_salt.encode(errors="surrogatepass")
    return blake2b(
        struct.pack("<Q", len(salt)) + salt + prompt_ids, digest_size=PROMPT_HASH_BYTES, person=b"pdserve prompt"
    ).digest()


class PrefixChain:
    """The block hashes of one growing sequence; each hash is computed once.

    `salt` separates sequences that must never share KV: other weights, another layout, another tenant.
    """

    def __init__(self, block_size: int, *, salt: bytes = b"") -> None:
        assert block_size > 0
        self._block_size = block_size
        self._last = root_hash(salt)
        self._hashes: list[BlockHash] = []

    def first(self, count: int, tokens: Sequence[int]) -> list[BlockHash]:
        """Return the hashes of the first `count` blocks of `tokens`, which must all be full.

        Tokens that an earlier call has seen must not have changed.
        """
        size = self._block_size
        assert count * size <= len(tokens)
        for start in range(len(self._hashes) * size, count * size, size):
            self._last = next_hash(self._last, struct.pack(f"<{size}I", *tokens[start : start + size]))
            self._hashes.append(self._last)
        return self._hashes[:count]


def block_hashes(tokens: Sequence[int], block_size: int, *, salt: bytes = b"") -> tuple[BlockHash, ...]:
    """Return one hash for each full block of `tokens`, in order. A last block that is not full gets no hash."""
    return tuple(PrefixChain(block_size, salt=salt).first(len(tokens) // block_size, tokens))


def root_hash(salt: bytes) -> BlockHash:
    """Return the hash that comes before the first block of a chain."""
    return next_hash(b"", salt)


def next_hash(parent: bytes, content: bytes) -> BlockHash:
    """Return the hash of the block that follows `parent`. `content` has its tokens, as little-endian uint32."""
    return BlockHash(blake2b(parent + content, digest_size=DIGEST_BYTES).digest())
