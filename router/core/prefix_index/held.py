"""The answer of a walk over the index of held prefixes. Pure."""

from __future__ import annotations

from router.core.events import LinkId


class Held:
    """The answer of one walk: how long a prefix of the walked keys each worker of the role holds. It is valid until the index
    changes."""

    __slots__ = ("_bits", "_links", "_steps")

    def __init__(self, steps: list[tuple[int, int]], bits: dict[LinkId, int], links: dict[int, LinkId]) -> None:
        """`steps` has lengths with the masks of the workers that hold just so many keys, shortest first."""
        self._steps = steps
        self._bits = bits
        self._links = links

    def __bool__(self) -> bool:
        return bool(self._steps)

    def blocks(self, link: LinkId) -> int:
        """Return how many of the first keys the worker holds."""
        bit = self._bits.get(link, 0)
        for length, mask in self._steps:
            if mask & bit:
                return length
        return 0

    def longest(self, n: int) -> list[LinkId]:
        """Return at most `n` workers that hold at least the first key: the longest prefix first, and equals by their slots."""
        found: list[LinkId] = []
        for _, mask in reversed(self._steps):
            while mask and len(found) < n:
                bit = mask & -mask
                mask ^= bit
                found.append(self._links[bit.bit_length() - 1])
        return found
