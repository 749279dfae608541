"""Checksums of KV blocks on the GPU that holds them: the sum of each stripe, as `pdserve.engine.kv.checksum` defines it.

Floor: each byte is read once. A prompt of 2,048 tokens of Llama-3-8B in bfloat16 is 268 MB: 0.06 ms at 4.8 TB/s, while
computing the prompt takes about 50 ms. A product of two 32-bit numbers is one instruction, and the order of integer sums
does not matter.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.kv.checksum import STRIPE_WORDS, keys

_STRIPE_BYTES = STRIPE_WORDS * 8


@triton.jit
def stripe_sums_kernel(sums, halves, keys, block_ids, block_halves, stripes, WORDS: tl.constexpr):
    """Grid (blocks, stripes). halves: the pool as 32-bit numbers; keys: [2 * WORDS] likewise, the low half of a word first."""
    index = tl.program_id(0)
    stripe = tl.program_id(1)
    word = tl.arange(0, WORDS)
    low_at = stripe * (2 * WORDS) + 2 * word
    begin = tl.load(block_ids + index) * block_halves
    low = tl.load(halves + begin + low_at, mask=low_at < block_halves, other=0).to(tl.uint32, bitcast=True)
    high = tl.load(halves + begin + low_at + 1, mask=low_at + 1 < block_halves, other=0).to(tl.uint32, bitcast=True)
    keyed_low = low ^ tl.load(keys + 2 * word).to(tl.uint32, bitcast=True)
    keyed_high = high ^ tl.load(keys + 2 * word + 1).to(tl.uint32, bitcast=True)
    turned = (low.to(tl.uint64) << 32) | high.to(tl.uint64)
    term = turned + keyed_low.to(tl.uint64) * keyed_high.to(tl.uint64)
    counted = tl.where(low_at < block_halves, term.to(tl.int64, bitcast=True), 0)
    tl.store(sums + index * stripes + stripe, tl.sum(counted))


def stripe_sums(blocks: Tensor, block_ids: Tensor) -> Tensor:
    """Return the stripe sums S(s) of the named blocks: [n, stripes] int64 with the bits of the unsigned sums.

    blocks: [blocks, block_bytes] uint8, each a whole number of 32-bit words. block_ids: [n] int64 on the same device.
    """
    block_bytes = blocks.shape[1]
    assert block_bytes % 4 == 0
    stripes = triton.cdiv(block_bytes, _STRIPE_BYTES)
    sums = torch.empty((len(block_ids), stripes), dtype=torch.int64, device=blocks.device)
    stripe_sums_kernel[(len(block_ids), stripes)](
        sums, blocks.view(-1).view(torch.int32), _keys(blocks.device), block_ids, block_bytes // 4, stripes,
        WORDS=STRIPE_WORDS, num_warps=4,
    )  # fmt: skip
    return sums


@cache
def _keys(device: torch.device) -> Tensor:
    return torch.from_numpy(keys().view("<i4")).to(device)
