"""Writes new K and V into a quantised pool that has one scale for each block and head.

Floor: the bytes moved. New tokens are read and written, and a decode also reads and writes its whole block once: 16 tokens
of int8, while attention reads thousands of tokens in the same step, so it is below 1 %.

A block fills over many steps, so its scale grows. When a new token exceeds the range of the scale, the older tokens of the
block are quantised again with the larger scale; otherwise they stay as they are, bit for bit. So a number may be rounded
more than once, each time by at most half a step of the scale of that moment, and earlier scales are smaller. Alternatives:
a scale for each token needs no second rounding, but takes 4 of 132 bytes a head (4 of 68 in int4); a fixed scale needs
calibration. The unwritten part of a block holds garbage of its former owner and is not read.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.kernels.flash import load_numbers
from pdserve.engine.kernels.support import next_power_of_2
from pdserve.engine.kv.format import SMALLEST_SCALE as _SMALLEST_SCALE
from pdserve.engine.kv.paged import KvFormat, LayerKv, PagedKv

SMALLEST_SCALE = tl.constexpr(_SMALLEST_SCALE)
_INT8 = tl.constexpr(int(KvFormat.INT8))
_FP8 = tl.constexpr(int(KvFormat.FP8_E4M3))
_INT4 = tl.constexpr(int(KvFormat.INT4))


@triton.jit
def rounded(x, LARGEST: tl.constexpr):
    """Round x to the nearest whole number, halves upwards, and limit it to [-LARGEST, LARGEST]. Returns int32."""
    return tl.minimum(tl.maximum(tl.floor(x + 0.5), -LARGEST), LARGEST).to(tl.int32)


@triton.jit
def to_fp8(x):
    """Convert float32 x within [-448, 448] to E4M3 in uint8, rounded to nearest, halves to even.

    It computes in integers for two reasons: the interpreter's own conversion drops the carry of a mantissa that rounds up
    to the next power of two, and devices before sm_89 have no conversion.
    """
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    bits += 0x7FFFF + ((bits >> 20) & 1)  # the last 20 of float32's 23 mantissa bits are dropped
    normal = (bits >> 20) - (120 << 3)  # the exponent's bias is 7, not 127
    # Neighbours of 2^14 are 2^-9 apart, so this rounds to multiples of 2^-9; 8 of them are the first normal number.
    small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return (tl.where(size < 0.015625, small, normal) | tl.where(x < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def quantise_kernel(
    key, value, key_scales, value_scales, new_key, new_value, touched,
    source_step, source_head_step, block_step, head_step, scales_step,
    FORMAT: tl.constexpr, LARGEST: tl.constexpr, OFFSETS: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, STORED_DIM: tl.constexpr,
):  # fmt: skip
    """Grid (num_kv_heads, touched blocks, planes of the pool: K and V, or one).

    touched: [blocks, 4] int32: the block, the row of its first new token in new_key and new_value [tokens, num_kv_heads,
    HEAD_DIM], the offset of this token in the block, and the number of new tokens. A row whose four fields are negative
    writes nothing. OFFSETS: the block size, padded to a power of two.
    """
    head = tl.program_id(0)
    fields = touched + tl.program_id(1) * 4
    block = tl.load(fields).to(tl.int64)
    source_row = tl.load(fields + 1).to(tl.int64)
    first = tl.load(fields + 2)
    end = first + tl.load(fields + 3)
    if tl.program_id(2) == 0:
        quantise_head(
            key, key_scales, new_key, head, block, source_row, first, end,
            source_step, source_head_step, block_step, head_step, scales_step,
            FORMAT, LARGEST, OFFSETS, HEAD_DIM, DIM, STORED_DIM,
        )  # fmt: skip
    else:
        quantise_head(
            value, value_scales, new_value, head, block, source_row, first, end,
            source_step, source_head_step, block_step, head_step, scales_step,
            FORMAT, LARGEST, OFFSETS, HEAD_DIM, DIM, STORED_DIM,
        )  # fmt: skip


@triton.jit
def quantise_head(
    data, scales, source, head, block, source_row, first, end,
    source_step, source_head_step, block_step, head_step, scales_step,
    FORMAT: tl.constexpr, LARGEST: tl.constexpr, OFFSETS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    STORED_DIM: tl.constexpr,
):  # fmt: skip
    """Write offsets [first, end) of one head of a block from `source`. Offsets [0, first) hold older tokens."""
    offset = tl.arange(0, OFFSETS)
    old = offset < first
    new = (offset >= first) & (offset < end)
    rows = block * block_step + head.to(tl.int64) * head_step + offset * STORED_DIM
    place = scales + block * scales_step + head
    # A block without older tokens has no scale yet: the memory holds a value of its former owner, which may be NaN.
    old_scale = tl.load(place + tl.zeros([1], tl.int32), mask=(tl.zeros([1], tl.int32) + first) > 0, other=0.0)
    older = load_numbers(data, rows, old, FORMAT, HEAD_DIM, DIM, tl.float32) * old_scale[:, None]
    dim = tl.arange(0, DIM)
    where = (source_row + offset - first)[:, None] * source_step + head * source_head_step + dim[None, :]
    newer = tl.load(source + where, mask=new[:, None] & (dim < HEAD_DIM)[None, :], other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.abs(newer), 1), 0)
    needed = largest / LARGEST
    scale = tl.maximum(old_scale, tl.where(needed < SMALLEST_SCALE, 0.0, needed))
    tl.store(place + tl.zeros([1], tl.int32), scale, mask=(tl.zeros([1], tl.int32) + end) > first)
    inverse = tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)
    scaled = (older + newer) * inverse[:, None]  # one of the two is 0
    written = new | (old & (scale > old_scale))
    tl.debug_barrier()  # threads store what other threads have loaded
    if FORMAT == _INT4:
        low, high = tl.split(tl.reshape(rounded(scaled, LARGEST) + 8, [OFFSETS, DIM // 2, 2]))
        pair = tl.arange(0, DIM // 2)
        mask = written[:, None] & (pair < HEAD_DIM // 2)[None, :]
        tl.store(data + rows[:, None] + pair[None, :], (low | (high << 4)).to(tl.uint8), mask=mask)
    else:
        if FORMAT == _FP8:
            stored = to_fp8(tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST))
        else:
            stored = rounded(scaled, LARGEST).to(tl.int8).to(tl.uint8, bitcast=True)
        mask = written[:, None] & (dim < HEAD_DIM)[None, :]
        tl.store(data + rows[:, None] + dim[None, :], stored, mask=mask)


def quantise_write(kv: PagedKv, layer: LayerKv, key: Tensor, value: Tensor, touched: Tensor) -> None:
    """Quantise new tokens and write them into their blocks of one layer.

    key, value: [tokens, num_kv_heads, head_dim], heads contiguous, equal strides; a pool of one plane takes the key.
    touched: [blocks, 4] int32 (see `touched_blocks`), no block twice.
    """
    assert kv.format is not KvFormat.PLAIN
    assert key.stride() == value.stride()
    if len(touched) == 0:
        return
    quantise_kernel[(kv.num_kv_heads, len(touched), kv.data.shape[2])](
        layer.key, layer.value, layer.key_scales, layer.value_scales, key, value, touched,
        key.stride(0), key.stride(1), layer.block_step, layer.head_step, layer.scales_step,
        FORMAT=int(kv.format), LARGEST=kv.format.largest,
        OFFSETS=next_power_of_2(kv.block_size), HEAD_DIM=kv.head_dim, DIM=next_power_of_2(kv.head_dim),
        STORED_DIM=kv.data.shape[-1], num_warps=4 if kv.head_dim <= 256 else 16,
    )  # fmt: skip
