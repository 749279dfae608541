"""The inner loop that prefill and decode share: a tile of query rows against a run of positions, with an online softmax.

The algorithm is FlashAttention-2 (Dao 2023, section 3.1.1): the result is divided by the running sum once, at the end.
Positions are found through the block table, as in PagedAttention (Kwon et al. 2023, section 4.1). There are two
differences. Exponentials are powers of two. And quantised numbers enter the matrix products as they are stored; bfloat16
holds them exactly. A scale belongs to one block and head, so a position has one scale. It multiplies scores and weights
instead of K and V, which saves block_size * head_dim multiplications for each scale.

The loop knows the addresses of a tile one turn before it loads the tile: it carries the entries of the block table from
one turn to the next. The compiler keeps several tiles of K and V in flight during the computation only when a turn needs
no load to find their addresses. When the entries were loaded in the same turn, the compiler kept one tile in flight and
waited for it (tests/kernels/test_kernels_compile.py looks at the compiled code).

A row is one query head of one token. The heads that share a KV head are rows of one tile, so K and V are read once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pdserve.engine.kv.paged import KvFormat

_PLAIN = tl.constexpr(int(KvFormat.PLAIN))
_INT8 = tl.constexpr(int(KvFormat.INT8))
_FP8 = tl.constexpr(int(KvFormat.FP8_E4M3))
_INT4 = tl.constexpr(int(KvFormat.INT4))


@triton.jit
def load_numbers(base, rows, there, FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, COMPUTE: tl.constexpr):
    """Return the stored numbers of positions without their scales: [positions, DIM] of COMPUTE.

    Columns after HEAD_DIM and positions where `there` is false are 0. Their memory is not read, since it may hold NaN.
    rows: [positions] int64, the start of each position after `base`, in elements.
    """
    if FORMAT == _INT4:
        pair = tl.arange(0, DIM // 2)
        mask = there[:, None] & (pair < HEAD_DIM // 2)[None, :]
        packed = tl.load(base + rows[:, None] + pair[None, :], mask=mask, other=0).to(tl.int32)
        packed = tl.where(mask, packed, 0x88)  # not as `other`: Triton 3.6 puts it into one of four bytes, and 0xFF into three
        numbers = tl.interleave((packed & 15) - 8, (packed >> 4) - 8).to(tl.float32)
    else:
        dim = tl.arange(0, DIM)
        mask = there[:, None] & (dim < HEAD_DIM)[None, :]
        numbers = tl.load(base + rows[:, None] + dim[None, :], mask=mask, other=0)
        if FORMAT == _FP8:
            numbers = numbers.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        elif FORMAT == _INT8:
            numbers = numbers.to(tl.int8, bitcast=True).to(tl.float32)
    return numbers.to(COMPUTE)


@triton.jit
def table_entries(table, n, lowest, end, BLOCK_SIZE: tl.constexpr):
    """Return the blocks of positions `n`: [positions] int32. Positions outside [lowest, end) are not looked up and give 0."""
    return tl.load(table + n // BLOCK_SIZE, mask=(n >= lowest) & (n < end), other=0)


@triton.jit
def load_query(
    query, rows, heads, mask, step,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr, REST_DIM: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Return the queries of a tile: the first HEAD_DIM numbers [rows, DIM], and the REST after them [rows, REST_DIM].

    rows: [rows] int64, heads: [rows], the row of each in query [tokens, heads, HEAD_DIM + REST]. Rows where `mask` is false
    are 0. Without a rest the second result is the first.
    """
    dim = tl.arange(0, DIM)
    place = query + rows[:, None] * step + heads[:, None] * (HEAD_DIM + REST)
    main = tl.load(place + dim[None, :], mask=mask[:, None] & (dim < HEAD_DIM)[None, :], other=0.0).to(COMPUTE)
    rest = main
    if REST > 0:
        more = tl.arange(0, REST_DIM)
        there = mask[:, None] & (more < REST)[None, :]
        rest = tl.load(place + HEAD_DIM + more[None, :], mask=there, other=0.0).to(COMPUTE)
    return main, rest


@triton.jit
def tile_scores(
    query, query_rest, key, key_scales, rows, there, block, scales_step, kv_head, score_factor, cap_factor,
    FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr, REST_DIM: tl.constexpr,
    STORED_DIM: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile before the mask, [rows, positions] in units of log2, and its keys [positions, DIM].

    rows: see `load_numbers`. there, block: [positions], whether each may be read, and its block. The other arguments are
    those of `attend`.
    """
    k = load_numbers(key, rows, there, FORMAT, HEAD_DIM, DIM, COMPUTE)
    scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
    if REST > 0:
        after = STORED_DIM * HEAD_DIM // (HEAD_DIM + REST)
        more = load_numbers(key + after, rows, there, FORMAT, REST, REST_DIM, COMPUTE)
        scores = tl.dot(query_rest, tl.trans(more), scores, input_precision=PRECISION)
    scores *= score_factor
    if FORMAT != _PLAIN:
        scores *= tl.load(key_scales + block * scales_step + kv_head, mask=there, other=0.0)[None, :]
    if CAPPED:  # tanh(x) = 1 - 2 / (e^(2 x) + 1), and scores hold 2 x in units of log2
        scores = cap_factor - 2.0 * cap_factor / (tl.exp2(scores) + 1.0)
    return scores, k


@triton.jit
def mask_scores(scores, n, there, position, WINDOW: tl.constexpr):
    """Return scores [rows, positions] with minus infinity where a row does not see a position. The arguments are those of
    `attend` and `tile_scores`; n: [positions], the positions of the tile.
    """
    seen = there[None, :] & (n[None, :] <= position[:, None])
    if WINDOW > 0:
        seen = seen & (n[None, :] > position[:, None] - WINDOW)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def attend(
    query, query_rest, position, maximum, total, acc,
    key, value, key_scales, value_scales, table,
    block_step, scales_step, kv_head, lowest, begin, end,
    score_factor, cap_factor,
    FORMAT: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr,
    REST_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr, V_DIM: tl.constexpr, STORED_DIM: tl.constexpr,
    V_STORED_DIM: tl.constexpr, TILE_N: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, MASKED: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add positions [begin, end) to the running softmax of a tile of rows, and return its new (maximum, total, acc).

    `begin` is a multiple of TILE_N. query, query_rest: the results of `load_query`. position: [rows] int32, the position of
    each row's token. maximum, total: [rows] float32, the maximum in units of log2. acc: [rows, V_DIM] float32, not yet
    divided by total. key, value: pointers to the layer and head. key_scales, value_scales: pointers to the layer. table: the
    sequence's block ids. score_factor, cap_factor: `KernelShape.factors`.

    With a REST, keys have REST numbers after the first HEAD_DIM, and these first numbers are the values as well: they are
    read once. WINDOW: a token sees the last WINDOW positions, its own included; 0 means all up to its own. Unless MASKED,
    every row sees all of [begin, end), which then consists of whole tiles. No row sees positions below `lowest`: their
    blocks may belong to another sequence by now.
    """
    offset = tl.arange(0, TILE_N)
    entries = table_entries(table, begin + offset, lowest, end, BLOCK_SIZE)
    for start in range(begin, end, TILE_N):
        n = start + offset
        if MASKED:
            there = (n < end) & (n >= lowest)
        else:
            there = n >= 0
        block = entries.to(tl.int64)
        entries = table_entries(table, n + TILE_N, lowest, end, BLOCK_SIZE)  # of the next tile
        rows = block * block_step + (n % BLOCK_SIZE) * STORED_DIM
        scores, k = tile_scores(
            query, query_rest, key, key_scales, rows, there, block, scales_step, kv_head, score_factor, cap_factor,
            FORMAT, HEAD_DIM, DIM, REST, REST_DIM, STORED_DIM, CAPPED, COMPUTE, PRECISION,
        )  # fmt: skip
        if MASKED:
            scores = mask_scores(scores, n, there, position, WINDOW)
        higher = tl.maximum(maximum, tl.max(scores, 1))
        anchor = tl.where(higher == float("-inf"), 0.0, higher)  # a row that has seen no position yet gets 0, not NaN
        weights = tl.exp2(scores - anchor[:, None])
        keep = tl.exp2(maximum - anchor)
        total = total * keep + tl.sum(weights, 1)
        if FORMAT != _PLAIN:
            weights *= tl.load(value_scales + block * scales_step + kv_head, mask=there, other=0.0)[None, :]
        if REST > 0:
            v = k
        else:
            if V_STORED_DIM == STORED_DIM:
                v_rows = rows
            else:
                v_rows = block * block_step + (n % BLOCK_SIZE) * V_STORED_DIM
            v = load_numbers(value, v_rows, there, FORMAT, V_HEAD_DIM, V_DIM, COMPUTE)
        acc = tl.dot(weights.to(COMPUTE), v, acc * keep[:, None], input_precision=PRECISION)
        maximum = higher
    return maximum, total, acc
