"""Hashes that name the content of full KV blocks: equal hashes mean equal KV. Keys, their beginnings, are hints about who holds
which KV. The module is pure and knows no pools.

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
from dataclasses import dataclass
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


def prompt_hash(prompt_ids: bytes, cache_salt: str, form: bytes = b"") -> bytes:
    """Return the hash that names a whole prompt with its salt. `prompt_ids` are little-endian uint32, as on the wire. `form`
    names the constraint of an output that goes on elsewhere under the same one. Empty: the hash is of the prompt alone."""
    content = encode_parts(_salt_bytes(cache_salt), prompt_ids, *([form] if form else []))
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


# Keys of prefixes -----------------------------------------------------------------------------------------------------
#
# Hints about who holds which KV: short names of published blocks, and the numbered changes of a worker's set of them.
#
# A key is the beginning of a block's hash (`core.block_hash`). Keys choose workers, and nothing else: only full hashes, which
# the owner of the blocks compares, name KV.
PrefixKey = NewType("PrefixKey", int)
"""The first 8 bytes of a block hash, as a little-endian number."""

KEY_BYTES: Final = 8
MAX_DELTA_KEYS: Final = 1 << 16
"""The most keys of a delta, added and removed keys together. The log of a worker drops changes beyond this number, and a link
that has missed changes gets all keys, a part in each delta."""
MAX_TOLD: Final = 8192
"""The most keys of a delta that begins anew; the other keys follow. The router takes 3 ms for each delta, or 13 ms on a slow
machine, and takes messages of other workers in between."""
TOLD_AT_ONCE: Final = 512
"""The number of keys that a worker reports without being asked. For a router that has started anew, the reports of 1,000
workers then take 0.8 s."""


@dataclass(frozen=True, slots=True)
class PrefixDelta:
    """The changes of the set of keys that one worker holds, since the last delta on the same link.

    `number` counts the deltas of a link from 1. `digest` is the exclusive or of all keys that the worker has reported on this
    link, this delta included. With `full`, `added` replaces all that was sent before; the next deltas have the rest of a large
    pool.
    """

    number: int
    added: tuple[int, ...]
    removed: tuple[int, ...]
    digest: int
    full: bool = False


@dataclass(frozen=True, slots=True)
class KeyChanges:
    """The changes of the set of keys that a pool holds, since they were taken last. `digest` is the digest of the present
    set."""

    added: tuple[int, ...]
    removed: tuple[int, ...]
    digest: int


class PublishedKeys:
    """The keys of the blocks that every KV group publishes, and what has changed among them.

    The pools of all groups report each hash to it. A key that came and went between two calls of `take` is no change.
    """

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups
        self._groups_with: dict[int, int] = {}
        self._changed: dict[int, bool] = {}
        self._digest = 0

    def publish(self, block_hash: BlockHash) -> None:
        """Note that a group publishes a block."""
        key = key_of(block_hash)
        self._groups_with[key] = count = self._groups_with.get(key, 0) + 1
        if count == self._num_groups:
            self._change(key, held=True)

    def remove(self, block_hash: BlockHash) -> None:
        """Note that a group no longer publishes a block. The key is gone with the first group that loses it."""
        key = key_of(block_hash)
        count = self._groups_with.pop(key)
        if count > 1:
            self._groups_with[key] = count - 1
        if count == self._num_groups:
            self._change(key, held=False)

    def take(self) -> KeyChanges | None:
        """Return the changes since the last call. None: there are none."""
        if not self._changed:
            return None
        changed, self._changed = self._changed, {}
        added = tuple([key for key, held in changed.items() if held])
        return KeyChanges(added, tuple([key for key, held in changed.items() if not held]), self._digest)

    def held(self) -> frozenset[int]:
        """Return all keys. The cost grows with their number."""
        return frozenset([key for key, count in self._groups_with.items() if count >= self._num_groups])

    def _change(self, key: int, *, held: bool) -> None:
        self._digest ^= key
        if self._changed.pop(key, held) is held:
            self._changed[key] = held


def key_of(block_hash: BlockHash) -> PrefixKey:
    """Return the key of a block."""
    return PrefixKey(int.from_bytes(block_hash[:KEY_BYTES], "little"))
