"""Rotary embedding (Su et al. 2021) of a step's queries and keys, after a norm of each head where the model has one. The kernel
also writes the KV of the step's tokens into their slots of the pool.

Floor: the bytes moved. Queries, K and V are each read once and written once: 2 * (num_heads + 2 * num_kv_heads) *
head_dim * element size a token. Llama-3-8B in bfloat16, 2,048 tokens: 50 MB, 10 us at 4.8 TB/s. In separate steps (norm,
rotate, cut, write by index) the same bytes would cross memory up to five times. Queries are rotated in place, so numbers that
are neither normed nor rotated do not move: in DeepSeek's latent attention 512 of the 576 of a head.

A program takes the heads of one group of one token: GROUP queries, a key and a value. A latent key is its own value, and
its last numbers are rotated instead of its first. A quantised pool needs the other tokens of a block as well. There this
kernel writes the rotated keys back in place, and `quantise.py` writes them to the pool.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.kernels.norm import weighed
from pdserve.engine.kernels.support import next_power_of_2
from pdserve.engine.kv.paged import KvFormat, LayerKv, PagedKv
from pdserve.engine.norms import HeadNorms


@triton.jit
def turned(
    heads, mask, cos, sin, weight, eps,
    HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    NORMED: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Return heads with their numbers [FIRST, FIRST + TURNED) rotated: the two halves of these, [heads, HALF] each, and the
    other numbers [heads, REST], all float32.

    heads: [heads] pointers to heads of HEAD_DIM numbers. mask: [heads]. cos, sin: [HALF]. weight: [HEAD_DIM], the weight of the
    norm.
    """
    dtype: tl.constexpr = heads.dtype.element_ty
    half = tl.arange(0, HALF)
    inside = mask[:, None] & (half < TURNED // 2)[None, :]
    place = heads[:, None] + FIRST + half[None, :]
    low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(place + TURNED // 2, mask=inside, other=0.0).to(tl.float32)
    other = tl.arange(0, REST)
    after = tl.where(FIRST == 0, TURNED, 0) + other
    there = other < HEAD_DIM - TURNED
    rest = tl.load(heads[:, None] + after[None, :], mask=mask[:, None] & there[None, :], other=0.0).to(tl.float32)
    if NORMED:
        squares = tl.sum(low * low, 1) + tl.sum(high * high, 1) + tl.sum(rest * rest, 1)
        scale = (1.0 / tl.sqrt(squares / HEAD_DIM + eps))[:, None]
        real = half < TURNED // 2
        low_weight = tl.load(weight + FIRST + half, mask=real, other=0.0).to(tl.float32)
        high_weight = tl.load(weight + FIRST + TURNED // 2 + half, mask=real, other=0.0).to(tl.float32)
        rest_weight = tl.load(weight + after, mask=there, other=0.0).to(tl.float32)
        low = weighed(low * scale, low_weight[None, :], OFFSET, dtype)
        high = weighed(high * scale, high_weight[None, :], OFFSET, dtype)
        rest = weighed(rest * scale, rest_weight[None, :], OFFSET, dtype)
    return low * cos[None, :] - high * sin[None, :], high * cos[None, :] + low * sin[None, :], rest


@triton.jit
def store_turned(
    heads, mask, low, high, rest,
    HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    ALL: tl.constexpr,
):  # fmt: skip
    """Write what `turned` returned to heads [heads] pointers where `mask` is true. Without ALL, the rest is left out."""
    half = tl.arange(0, HALF)
    inside = mask[:, None] & (half < TURNED // 2)[None, :]
    place = heads[:, None] + FIRST + half[None, :]
    dtype: tl.constexpr = heads.dtype.element_ty
    tl.store(place, low.to(dtype), mask=inside)
    tl.store(place + TURNED // 2, high.to(dtype), mask=inside)
    if ALL:
        other = tl.arange(0, REST)
        after = tl.where(FIRST == 0, TURNED, 0) + other
        there = mask[:, None] & (other < HEAD_DIM - TURNED)[None, :]
        tl.store(heads[:, None] + after[None, :], rest.to(dtype), mask=there)


@triton.jit
def rope_kernel(
    projected, table_rows, key, value, slots, q_weight, k_weight, eps, projected_step, slots_step, head_step,
    GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, FIRST: tl.constexpr,
    TURNED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, NORMED: tl.constexpr, OFFSET: tl.constexpr,
    VALUES: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """Grid (num_kv_heads, tokens).

    projected: [tokens, (GROUP + 1 + VALUES) * num_kv_heads, HEAD_DIM], q then k then v; queries are changed in place.
    table_rows: [tokens, 2, TURNED] float32, cosines, then sines with the first half negated. slots: [tokens] int64 (see
    `rotate_and_write`). Numbers [FIRST, FIRST + TURNED) of a head are rotated. HALF: half of TURNED, REST: HEAD_DIM - TURNED,
    DIM: HEAD_DIM, all padded to powers of two. VALUES: there is a value for each key. WRITE: KV goes to the pool; otherwise
    the keys in `projected` are changed in place.
    """
    kv_head = tl.program_id(0)
    kv_heads = tl.num_programs(0)
    token = tl.program_id(1).to(tl.int64)
    half = tl.arange(0, HALF)
    inside = half < TURNED // 2
    table = table_rows + token * 2 * TURNED + half
    cos = tl.load(table, mask=inside, other=0.0)
    sin = tl.load(table + TURNED + TURNED // 2, mask=inside, other=0.0)

    g = tl.arange(0, GROUP_PADDED)
    source = projected + token * projected_step
    queries = source + (kv_head * GROUP + g) * HEAD_DIM
    # Where heads are not normed, the numbers that are not rotated do not matter: a rest of one number stands for them.
    Q_REST: tl.constexpr = REST if NORMED else 1
    low, high, rest = turned(queries, g < GROUP, cos, sin, q_weight, eps, HEAD_DIM, FIRST, TURNED, HALF, Q_REST, NORMED, OFFSET)
    store_turned(queries, g < GROUP, low, high, rest, HEAD_DIM, FIRST, TURNED, HALF, Q_REST, NORMED)

    one = tl.arange(0, 1)
    keys = source + (kv_heads * GROUP + kv_head + one) * HEAD_DIM
    low, high, rest = turned(keys, one == 0, cos, sin, k_weight, eps, HEAD_DIM, FIRST, TURNED, HALF, REST, NORMED, OFFSET)
    if WRITE:
        slot = tl.load(slots + token * slots_step)
        place = slot * HEAD_DIM + kv_head.to(tl.int64) * head_step
        store_turned(key + place + one, slot + one >= 0, low, high, rest, HEAD_DIM, FIRST, TURNED, HALF, REST, True)
        if VALUES:
            dim = tl.arange(0, DIM)
            there = dim < tl.where(slot >= 0, HEAD_DIM, 0)
            values = source + (kv_heads * (GROUP + 1) + kv_head) * HEAD_DIM + dim
            tl.store(value + place + dim, tl.load(values, mask=there, other=0.0), mask=there)
    else:
        store_turned(keys, one == 0, low, high, rest, HEAD_DIM, FIRST, TURNED, HALF, REST, NORMED)


def rotate_and_write(
    projected: Tensor, table_rows: Tensor, kv: PagedKv, layer: LayerKv, slots: Tensor, norms: HeadNorms | None = None
) -> Tensor:
    """Rotate queries and keys, write the KV of one layer, and return the rotated queries [tokens, num_heads, head_dim].

    projected: [tokens, (num_heads + planes * num_kv_heads) * head_dim], q then the planes of KV, rows contiguous, of the
    pool's dtype. The result is a view of it. table_rows: [tokens, 2, dim] float32 (`rope_table`): the first dim numbers of a
    head are rotated, or, in a pool of one plane, the last. slots: [tokens] int64, the first column of `KvCache.slots`: the
    place of a token's K of head 0 in layer 0, in rows of head_dim elements. A token with a negative slot is written nowhere.
    norms: applied to each head of queries and keys first.

    When the pool is quantised, nothing is written, and the keys within `projected` are changed in place.
    """
    tokens, planes, dim = projected.shape[0], kv.data.shape[2], kv.head_dim
    group = projected.shape[1] // (dim * kv.num_kv_heads) - planes
    write = kv.format is KvFormat.PLAIN
    rotated = table_rows.shape[2]
    if tokens:
        norm = None if norms is None else norms.query
        rows, half = next_power_of_2(group), next_power_of_2(rotated // 2)
        rope_kernel[(kv.num_kv_heads, tokens)](
            projected, table_rows, layer.key if write else projected, layer.value if write else projected, slots,
            projected if norms is None else norms.query.weight, projected if norms is None else norms.key.weight,
            0.0 if norm is None else norm.eps, projected.stride(0), slots.stride(0), layer.head_step,
            GROUP=group, GROUP_PADDED=rows, HEAD_DIM=dim, DIM=next_power_of_2(dim),
            FIRST=dim - rotated if planes == 1 else 0, TURNED=rotated, HALF=half, REST=next_power_of_2(max(1, dim - rotated)),
            NORMED=norms is not None, OFFSET=0.0 if norm is None else norm.offset, VALUES=planes > 1, WRITE=write,
            num_warps=1 if rows * half <= 512 else 4,
        )  # fmt: skip
    return projected[:, : group * kv.num_kv_heads * dim].view(tokens, -1, dim)
