"""Hints about who holds which KV: short names of published blocks, and the numbered changes of a worker's set of them. Pure.

A key is the beginning of a block's hash (`core.block_hash`). Keys choose workers, and nothing else: only full hashes, which the
owner of the blocks compares, name KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NewType

from pdserve.core.block_hash import BlockHash

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
