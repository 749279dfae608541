"""Redaction of prefix keys: a recording has other keys in their place, and equal keys stay equal.

A delta carries the exclusive or of all keys that its worker holds, which no map of a single key can replace. So the redaction
follows each worker's keys, and writes the exclusive or of their replacements. A digest that was wrong in the router's run is
still wrong by the same difference, so a replay asks for the keys again where the router did.
"""

from __future__ import annotations

from functools import reduce
from hashlib import blake2b
from operator import xor
from typing import Any

from pdserve.core.block_hash import KEY_BYTES


class KeyRedaction:
    """Replaces the keys of one recording. It must see all events in order."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._digests: dict[int, tuple[int, int]] = {}
        """The exclusive or of each link's keys, and of what replaces them."""

    def keys(self, keys: list[int]) -> list[int]:
        """Return what replaces these keys."""
        return [self._key(key) for key in keys]

    def seen(self, event: dict[str, Any]) -> dict[str, Any]:
        """Return the plain value of a `PrefixSeen` with other keys."""
        link, delta = event["link"], event["delta"]
        added, removed = self.keys(delta["added"]), self.keys(delta["removed"])
        true, told = (0, 0) if delta["full"] else self._digests.get(link, (0, 0))
        true, told = _changed(true, delta["added"], delta["removed"]), _changed(told, added, removed)
        self._digests[link] = true, told
        replaced = {"added": added, "removed": removed, "digest": delta["digest"] ^ true ^ told}
        return event | {"delta": delta | replaced}

    def left(self, link: int) -> None:
        """Forget a link that has ended."""
        self._digests.pop(link, None)

    def _key(self, key: int) -> int:
        told = blake2b(key.to_bytes(KEY_BYTES, "little"), digest_size=KEY_BYTES, key=self._secret)
        return int.from_bytes(told.digest(), "little")


def _changed(digest: int, added: list[int], removed: list[int]) -> int:
    return reduce(xor, removed, reduce(xor, added, digest))
