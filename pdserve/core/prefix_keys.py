"""Hints about who holds which KV: short names of published blocks, and the numbered changes of a worker's set of them. Pure.

A key is the beginning of a block's hash (`core.block_hash`). Keys choose workers, and nothing else: only full hashes, which the
owner of the blocks compares, name KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NewType

PrefixKey = NewType("PrefixKey", int)
"""The first 8 bytes of a block hash, as a little-endian number."""

KEY_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class PrefixDelta:
    """The changes of the set of keys that one worker holds, since the last delta on the same link.

    `number` counts the deltas of a link from 1. `digest` is the exclusive or of all keys that the worker holds after this
    delta. With `full`, `added` lists all of them, and what was known before is replaced.
    """

    number: int
    added: tuple[int, ...]
    removed: tuple[int, ...]
    digest: int
    full: bool = False
