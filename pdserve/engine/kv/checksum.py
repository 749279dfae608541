"""Checksums of KV blocks: 64 bits over all stored bytes. Compiled code, a Triton kernel and numpy give the same bits.

The words x of a block are 64 bits long, little-endian, the last one filled up with zeros. K are 512 fixed random odd
numbers. `mix` spreads every bit of 64 over all of them. All arithmetic is modulo 2^64:

    stripe s     512 words:  S(s) = sum over i of  rot32(x[i]) + low32(x[i] ^ K[i]) * high32(x[i] ^ K[i])
    block        mix( nbytes + sum over s of  mix(S(s) + (s + 1) * GOLDEN) )

The product makes the sum depend on the place of a word in its stripe, and `mix` makes it depend on the place of a stripe in
its block. The rotated word beside the product ensures that a change of one word always changes the sum. Sums of integers do
not depend on their order, so vectors of any width give the same bits. The checksum finds accidental changes; it misses one
with a probability of about 2^-64. It is no MAC: an attacker can find two blocks with the same checksum.

Rejected: CRC32C, which finds as much in 32 bits but is a chain of dependent steps; xxh3, whose lanes depend on each other
in an order that a GPU would have to follow; BLAKE3 and similar hashes, which run at a tenth of the rate for a guarantee that
is not needed here: whoever can write into a peer's memory can also write a checksum.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pdserve.core.ids import BlockSum

STRIPE_WORDS: Final = 512
"""Words of 8 bytes in a stripe. 4 KiB of data and 4 KiB of keys stay in a core's first-level cache."""
GOLDEN: Final = 0x9E3779B97F4A7C15
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_LOW: Final = np.uint64(0xFFFFFFFF)
_32: Final = np.uint64(32)

Words = npt.NDArray[np.uint64]


def mix(words: Words) -> Words:
    """Apply the finaliser of splitmix64 to each word (Steele, Lea, Flood 2014; constants of Stafford's variant 13)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    return words ^ (words >> np.uint64(31))


def keys() -> Words:
    """Return the keys K [STRIPE_WORDS]: the output of splitmix64 from 0, made odd."""
    return mix(np.arange(1, STRIPE_WORDS + 1, dtype=np.uint64) * np.uint64(GOLDEN)) | np.uint64(1)


_KEYS: Final = keys()


def combine(stripes: Words, block_bytes: int) -> tuple[BlockSum, ...]:
    """Return the checksum of each block. stripes: [blocks, stripes], the sums S(s)."""
    places = np.arange(1, stripes.shape[1] + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    totals = mix(stripes + places).sum(1, dtype=np.uint64) + np.uint64(block_bytes)
    return tuple(BlockSum(value) for value in mix(totals).tolist())


def sums_in_numpy(blocks: npt.NDArray[np.uint8]) -> tuple[BlockSum, ...]:
    """Return the checksums of blocks [blocks, block_bytes] by numpy.

    This is the readable form. It also serves machines that have neither the compiled code nor the kernel.
    """
    block_bytes = blocks.shape[1]
    stripes = [_stripes(block) for block in blocks]  # one by one, so a block and its intermediate results stay in the caches
    return combine(np.stack(stripes), block_bytes) if stripes else ()


def _stripes(block: npt.NDArray[np.uint8]) -> Words:
    """Return the sums S(s) of one block: [stripes]."""
    words_used = -(-len(block) // 8)
    padded = np.zeros(-(-words_used // STRIPE_WORDS) * STRIPE_WORDS * 8, np.uint8)
    padded[: len(block)] = block
    words = padded.view("<u8").reshape(-1, STRIPE_WORDS)
    keyed = words ^ _KEYS
    terms = ((words >> _32) | (words << _32)) + (keyed & _LOW) * (keyed >> _32)
    terms.reshape(-1)[words_used:] = 0
    sums: Words = terms.sum(1, dtype=np.uint64)
    return sums
