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


def block_hashes(tokens: Sequence[int], block_size: int, *, salt: bytes = b"") -> tuple[BlockHash, ...]:
    """One hash for each full block of `tokens`, in order; a last block that is not full has none.

    `salt` separates what must never share KV: other weights, another layout, another tenant.
    """
    assert block_size > 0
    parent = _hash(b"", salt)
    chain: list[BlockHash] = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = _hash(parent, struct.pack(f"<{block_size}I", *tokens[start : start + block_size]))
        chain.append(parent)
    return tuple(chain)


def _hash(parent: bytes, content: bytes) -> BlockHash:
    return BlockHash(blake2b(parent + content, digest_size=DIGEST_BYTES).digest())
