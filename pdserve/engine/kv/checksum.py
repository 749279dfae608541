"""Checksums of KV blocks: 64 bits over all stored bytes. Compiled code, a Triton kernel and numpy give the same bits.

A unit is the numbers of one head of one plane of one layer, or one scale (`pdserve.core.kv_layout.Unit`). A stripe is a part of
a unit: 512 words, or what is left. The words x of a stripe are 64 bits long, little-endian, the last one filled up with zeros.
K are 512 fixed random odd numbers. `mix` spreads every bit of 64 over all of them. All arithmetic is modulo 2^64:

    stripe s of the unit in place p      S = sum over i of  rot32(x[i]) + low32(x[i] ^ K[i]) * high32(x[i] ^ K[i])
    anything                             sum over its stripes of  mix(S + (p * 2^20 + s + 1) * GOLDEN)

The product makes the sum depend on the place of a word in its stripe, and `mix` makes it depend on the place of a stripe among
all stripes of the block. The rotated word beside the product ensures that a change of one word always changes the sum. Sums of
integers do not depend on their order, so vectors of any width give the same bits. The checksum finds accidental changes; it
misses one with a probability of about 2^-64. It is no MAC: an attacker can find two blocks with the same checksum.

The checksums of parts that have no unit in common add up to the checksum of both, because nothing is computed from the total
and the place of a unit does not depend on where its bytes lie. So each rank of a gang sums what it stores, and a lender and a
reader can compare a block that they cut differently. The number of bytes does not count; both sides know it from the layout.

Rejected: stripes of a block's bytes in the order in which one layout stores them, because ranks that cut a block differently
have no stripe in common; one checksum for each part, because there would be as many as pairs of ranks, and Commit would have to
tell which is which; a `mix` of the total, after which sums do not add; CRC32C, which finds as much in 32 bits but is a chain of
dependent steps; xxh3, whose lanes depend on each other in an order that a GPU would have to follow; BLAKE3 and similar hashes,
which run at a tenth of the rate for a guarantee that is not needed here: whoever can write into the memory of a peer can also
write a checksum.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from pdserve.core.ids import BlockSum
from pdserve.core.kv_layout import KvGroup, Unit, whole_share

STRIPE_WORDS: Final = 512
"""Words of 8 bytes in a stripe. 4 KiB of data and 4 KiB of keys stay in a core's first-level cache."""
STRIPE_BYTES: Final = STRIPE_WORDS * 8
_UNIT_STRIPES: Final = 1 << 20
"""More stripes than a unit can have: 4 GiB."""
GOLDEN: Final = 0x9E3779B97F4A7C15
FIRST: Final = 0xBF58476D1CE4E5B9
SECOND: Final = 0x94D049BB133111EB
_LOW: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)

Words = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]


def mix(words: Words) -> Words:
    """Apply the finaliser of splitmix64 to each word (Steele, Lea, Flood 2014; constants of Stafford's variant 13)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(SECOND)
    return words ^ (words >> np.uint64(31))


def keys() -> Words:
    """Return the keys K [STRIPE_WORDS]: the output of splitmix64 from 0, made odd."""
    return mix(np.arange(1, STRIPE_WORDS + 1, dtype=np.uint64) * np.uint64(GOLDEN)) | np.uint64(1)


_KEYS: Final = keys()


@dataclass(frozen=True, slots=True, eq=False)
class Stripes:
    """The stripes of a block in the memory that holds it, one row for each.

    Ranks that store parts of a block have a table each, with the keys of their own units.
    """

    offset: Integers
    """[stripes], in bytes from the beginning of the block's memory."""
    nbytes: Integers
    """[stripes], from 1 to STRIPE_BYTES."""
    key: Words
    """[stripes], what is added to S before `mix`. All keys of a block differ."""

    @classmethod
    def of(cls, units: Iterable[Unit]) -> Stripes:
        """Cut units into stripes."""
        rows = [
            (offset + begin, min(nbytes - begin, STRIPE_BYTES), place * _UNIT_STRIPES + number + 1)
            for offset, nbytes, place in units
            for number, begin in enumerate(range(0, nbytes, STRIPE_BYTES))
        ]
        offset, nbytes, number = np.array(rows, np.int64).reshape(-1, 3).T.copy()
        return cls(offset, nbytes, number.view(np.uint64) * np.uint64(GOLDEN))

    @classmethod
    def plain(cls, nbytes: int) -> Stripes:
        """Return the stripes of a block of bytes that has no layout. The block is one unit in place 0."""
        assert nbytes <= _UNIT_STRIPES * STRIPE_BYTES
        return cls.of([Unit(0, nbytes, 0)])

    def lie_in(self, block_bytes: int) -> bool:
        """Tell whether all stripes lie in a block of this size."""
        return bool((self.offset >= 0).all() and (self.offset + self.nbytes <= block_bytes).all())


def stripes_of(group: KvGroup) -> Stripes:
    """Return the stripes of a whole block of a KV group. Asserts that they have all of its bytes."""
    share = whole_share(group)
    stripes = Stripes.of(share.units(group, share))
    assert stripes.nbytes.sum() == group.block_bytes, "the planes of a group that is summed have equally many heads"
    return stripes


def sums_in_numpy(blocks: npt.NDArray[np.uint8], stripes: Stripes) -> tuple[BlockSum, ...]:
    """Return the checksums of blocks [blocks, block_bytes] by numpy.

    This is the readable form. It also serves machines that have neither the compiled code nor the kernel.
    """
    totals = np.zeros(len(blocks), np.uint64)
    for nbytes in np.unique(stripes.nbytes).tolist():  # two or three: heads of K and of V, or what is left of them, and scales
        alike = stripes.nbytes == nbytes
        offset, key = stripes.offset[alike], stripes.key[alike]
        # One block after the other, so a block and its intermediate results stay in the caches.
        found = [_stripes(block[offset]) for block in sliding_window_view(blocks, nbytes, axis=1)]
        totals += mix(np.array(found, np.uint64).reshape(-1, len(key)) + key).sum(1, dtype=np.uint64)
    return tuple(BlockSum(value) for value in totals.tolist())


def add_sums(*parts: Sequence[BlockSum]) -> tuple[BlockSum, ...]:
    """Return the checksums of blocks whose parts have these checksums. Each part names the blocks in the same order."""
    return tuple(BlockSum(sum(block) % 2**64) for block in zip(*parts, strict=True))


def _stripes(stripes: npt.NDArray[np.uint8]) -> Words:
    """Return the sums S of stripes [stripes, bytes]."""
    count, nbytes = stripes.shape
    padded = np.zeros((count, -(-nbytes // 8) * 8), np.uint8)
    padded[:, :nbytes] = stripes
    words = padded.view("<u8")
    keyed = words ^ _KEYS[: words.shape[1]]
    terms = ((words >> _32) | (words << _32)) + (keyed & _LOW) * (keyed >> _32)
    sums: Words = terms.sum(1, dtype=np.uint64)
    return sums
