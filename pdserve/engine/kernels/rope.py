"""Rotary embedding (Su et al. 2021) of a step's queries and keys; it also writes K and V into their slots of the pool.

Floor: the bytes moved. Queries, K and V are each read once and written once: 2 * (num_heads + 2 * num_kv_heads) *
head_dim * element size a token. Llama-3-8B in bfloat16, 2,048 tokens: 50 MB, 10 us at 4.8 TB/s. In separate steps (rotate,
cut, write by index) the same bytes would cross memory three times.

A program takes the heads of one group of one token: GROUP queries, a key and a value. A quantised pool needs the other
tokens of a block as well. There this kernel writes the rotated keys back in place, and `quantise.py` writes them to the
pool.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.kernels.support import next_power_of_2
from pdserve.engine.kv.paged import KvFormat, LayerKv, PagedKv


@triton.jit
def rope_kernel(
    out, projected, table_rows, key, value, slots, projected_step, out_step, slots_step, head_step,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Grid (num_kv_heads, tokens).

    projected: [tokens, (GROUP + 2) * num_kv_heads, HEAD_DIM], q then k then v. out: [tokens, GROUP * num_kv_heads, HEAD_DIM].
    table_rows: [tokens, 2, HEAD_DIM] float32, cosines, then sines with the first half negated. slots: [tokens] int64 (see
    `rotate_and_write`). HALF: half of HEAD_DIM, padded to a power of two. WRITE: K and V go to the pool; otherwise the keys
    in `projected` are rotated in place.
    """
    kv_head = tl.program_id(0)
    kv_heads = tl.num_programs(0)
    token = tl.program_id(1).to(tl.int64)
    half = tl.arange(0, HALF)
    inside = half < HEAD_DIM // 2
    table = table_rows + token * 2 * HEAD_DIM + half
    cos = tl.load(table, mask=inside, other=0.0)
    sin = tl.load(table + HEAD_DIM + HEAD_DIM // 2, mask=inside, other=0.0)

    g = tl.arange(0, GROUP_PADDED)
    source = projected + token * projected_step
    heads = (kv_head * GROUP + g)[:, None] * HEAD_DIM + half[None, :]
    mask = (g < GROUP)[:, None] & inside[None, :]
    low = tl.load(source + heads, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(source + heads + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    target = out + token * out_step + heads
    tl.store(target, (low * cos[None, :] - high * sin[None, :]).to(out.dtype.element_ty), mask=mask)
    tl.store(target + HEAD_DIM // 2, (high * cos[None, :] + low * sin[None, :]).to(out.dtype.element_ty), mask=mask)

    keys = source + (kv_heads * GROUP + kv_head) * HEAD_DIM + half
    low = tl.load(keys, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(keys + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    rotated_low = (low * cos - high * sin).to(key.dtype.element_ty)
    rotated_high = (high * cos + low * sin).to(key.dtype.element_ty)
    if WRITE:
        slot = tl.load(slots + token * slots_step)
        place = slot * HEAD_DIM + kv_head.to(tl.int64) * head_step
        there = inside & (half < tl.where(slot >= 0, HALF, 0))
        tl.store(key + place + half, rotated_low, mask=there)
        tl.store(key + place + half + HEAD_DIM // 2, rotated_high, mask=there)
        values = keys + kv_heads * HEAD_DIM
        tl.store(value + place + half, tl.load(values, mask=inside, other=0.0), mask=there)
        tl.store(value + place + half + HEAD_DIM // 2, tl.load(values + HEAD_DIM // 2, mask=inside, other=0.0), mask=there)
    else:
        tl.store(keys, rotated_low, mask=inside)
        tl.store(keys + HEAD_DIM // 2, rotated_high, mask=inside)


def rotate_and_write(projected: Tensor, table_rows: Tensor, kv: PagedKv, layer: LayerKv, slots: Tensor) -> Tensor:
    """Rotate queries and keys, write K and V of one layer, and return the rotated queries [tokens, num_heads, head_dim].

    projected: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], q then k then v, rows contiguous, of the pool's dtype.
    table_rows: [tokens, 2, head_dim] float32 (`rope_table`). slots: [tokens] int64, the first column of `KvCache.slots`: the
    place of a token's K of head 0 in layer 0, in rows of head_dim elements. A token with a negative slot is written nowhere.

    When the pool is quantised, nothing is written, and the keys within `projected` are rotated in place.
    """
    tokens = projected.shape[0]
    group = projected.shape[1] // (kv.head_dim * kv.num_kv_heads) - 2
    out = torch.empty((tokens, group * kv.num_kv_heads, kv.head_dim), dtype=projected.dtype, device=projected.device)
    write = kv.format is KvFormat.PLAIN
    if tokens:
        rope_kernel[(kv.num_kv_heads, tokens)](
            out, projected, table_rows, layer.key if write else projected, layer.value if write else projected, slots,
            projected.stride(0), out.stride(0), slots.stride(0), layer.head_step,
            GROUP=group, GROUP_PADDED=next_power_of_2(group), HEAD_DIM=kv.head_dim,
            HALF=next_power_of_2(kv.head_dim // 2), WRITE=write, num_warps=1 if group < 8 else 4,
        )  # fmt: skip
    return out
