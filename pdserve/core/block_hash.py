"""Hashes that name the content of full KV blocks: equal hashes mean equal KV. The module is pure and knows no pools.

The KV of a block depends on every token before it, so a block's hash covers its parent's:

```
root = R(salt)     hash 0 = H(root, tokens of block 0)     hash i = H(hash i-1, tokens of block i)
```

R is H with another personalisation, so no salt that a client chooses gives the hash of a block. What goes into a hash beside
tokens is written by `encode_parts` alone: two different lists of parts never give the same bytes.
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


def encode_parts(*parts: bytes) -> bytes:
    """Return the parts as one string of bytes, each after its length in 8 bytes (little-endian).

    The encoding is injective for any number of parts: a reader that repeatedly takes a length and that number of bytes gets
    exactly these parts back.
    """
    return b"".join([piece for part in parts for piece in (struct.pack("<Q", len(part)), part)])


def chain_salt(model_salt: bytes, cache_salt: str) -> bytes:
    """Return the salt of a sequence's chain. `model_salt` names the weights. Only equal `cache_salt`s share blocks."""
    return encode_parts(model_salt, _salt_bytes(cache_salt))


def prompt_hash(prompt_ids: bytes, cache_salt: str) -> bytes:
    """Return the hash that names a whole prompt with its salt. `prompt_ids` are little-endian uint32, as on the wire."""
    content = encode_parts(_salt_bytes(cache_salt), prompt_ids)
    return blake2b(content, digest_size=PROMPT_HASH_BYTES, person=b"pdserve prompt").digest()


def _salt_bytes(cache_salt: str) -> bytes:
    """Return the bytes of a client's salt. Lone surrogates, which JSON allows, stay apart from each other and from all else."""
    return cache_salt.encode(errors="surrogatepass")


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
    return BlockHash(blake2b(salt, digest_size=DIGEST_BYTES, person=b"pdserve root").digest())


def next_hash(parent: bytes, content: bytes) -> BlockHash:
    """Return the hash of the block that follows `parent`. `content` has its tokens, as little-endian uint32."""
    return BlockHash(blake2b(parent + content, digest_size=DIGEST_BYTES).digest())
