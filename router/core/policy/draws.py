"""Random numbers as values: each one is a pure function of the core's seed, the number of the pick, and the worker."""

from __future__ import annotations

from typing import Final

_MASK: Final = (1 << 64) - 1


def splitmix64(number: int) -> int:
    """Return the output of SplitMix64 for a state (Steele, Lea and Flood, 2014): 64 bits that look random."""
    mixed = (number + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def draw(seed: int, pick: int, link: int) -> float:
    """Return a number in [0, 1). It is another one for each seed, pick and link."""
    return (splitmix64(splitmix64(splitmix64(seed) ^ pick) ^ link) >> 11) / (1 << 53)
