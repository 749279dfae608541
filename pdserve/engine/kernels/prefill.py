"""Causal attention of chunked prefill: tokens of many sequences, each against its own past in the pool.

Floor: 4 * head_dim operations for each query head and each pair of a token and a position that it sees. Llama-3-8B, a
prompt of 2,048 tokens: 2,048 * 2,049 / 2 * 32 heads * 32 layers * 512 = 1.1 TFLOP, and 33 TFLOP for the weights; at 790
TFLOP/s 1.4 ms of 43. K and V are read once for each query tile and KV head: with 128 rows a tile that is 128 operations a
byte in bfloat16, of which half hit the L2 cache.

Work is split as in FlashAttention-2 (Dao 2023, section 3.2): a program is one tile of query rows of one KV head.
Rows are (token, head of the group) with the heads next to each other, so with four query heads for each KV head a tile of
128 rows holds 32 tokens. Tiles that every row sees whole need no mask; tiles on the diagonal and at the edge of the window
need one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.kernels.flash import attend, load_query
from pdserve.engine.kernels.shape import KernelShape
from pdserve.engine.kernels.tiling import Tiling, assert_sound, dot_dtype, dot_precision
from pdserve.engine.kv.paged import LayerKv

TILE_FIELDS = 4  # sequence, first query row, position of that row's token, tokens


@triton.jit
def spans(first, end, WINDOW: tl.constexpr, TILE_N: tl.constexpr):
    """Return (lowest, begin, left, right) for a tile of the tokens [first, end), which cut what they see at whole tiles.

    lowest is the oldest position that a token sees. In [begin, left) some rows do not see the oldest positions. In [left,
    right) all rows see all. [right, end) is the diagonal.
    """
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(first - WINDOW + 1, 0)
    begin = lowest // TILE_N * TILE_N
    left = begin
    if WINDOW > 0:
        left = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), TILE_N) * TILE_N, tl.cdiv(end, TILE_N) * TILE_N)
        left = tl.maximum(left, begin)
    right = tl.maximum((first + 1) // TILE_N * TILE_N, left)
    return lowest, begin, left, right


@triton.jit(do_not_specialize=["table_step"])  # the width of the tables changes from step to step
def prefill_kernel(
    out, query, key, value, key_scales, value_scales, tables, tiles,
    score_factor, cap_factor, table_step, query_step, out_step, block_step, scales_step,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr, REST_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr, STORED_DIM: tl.constexpr, V_STORED_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of heads, tiles). A tile of heads has HEADS of the GROUP heads that share a KV head.

    query: [tokens, heads, HEAD_DIM + REST]; out: [tokens, heads, V_HEAD_DIM]; tables: [sequences, blocks] int32. tiles:
    [tiles, 4] int32: sequence, row of the first token in query, position of this token, number of tokens (at most
    TILE_M // HEADS). The other arguments are those of `attend`.
    """
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // TILES
    fields = tiles + tl.program_id(1) * 4
    sequence = tl.load(fields)
    first_row = tl.load(fields + 1)
    first = tl.load(fields + 2)
    count = tl.load(fields + 3)
    m = tl.arange(0, TILE_M)
    token = m // HEADS
    of_group = (tl.program_id(0) % TILES) * HEADS + m % HEADS
    real = (token < count) & (of_group < GROUP)
    position = first + tl.minimum(token, count - 1)
    row = (first_row + token).to(tl.int64)
    head = kv_head * GROUP + of_group
    q, q_rest = load_query(query, row, head, real, query_step, HEAD_DIM, DIM, REST, REST_DIM, COMPUTE)

    end = first + count
    lowest, begin, left, right = spans(first, end, WINDOW, TILE_N)
    maximum = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, V_DIM], tl.float32)
    k = key + kv_head.to(tl.int64) * (BLOCK_SIZE * STORED_DIM)
    v = value + kv_head.to(tl.int64) * (BLOCK_SIZE * V_STORED_DIM)
    table = tables + sequence.to(tl.int64) * table_step
    if WINDOW > 0:
        maximum, total, acc = attend(
            q, q_rest, position, maximum, total, acc, k, v, key_scales, value_scales, table,
            block_step, scales_step, kv_head, lowest, begin, tl.minimum(left, end), score_factor, cap_factor,
            FORMAT, BLOCK_SIZE, HEAD_DIM, DIM, REST, REST_DIM, V_HEAD_DIM, V_DIM, STORED_DIM, V_STORED_DIM, TILE_N,
            WINDOW, CAPPED, True, COMPUTE, PRECISION,
        )  # fmt: skip
    maximum, total, acc = attend(
        q, q_rest, position, maximum, total, acc, k, v, key_scales, value_scales, table,
        block_step, scales_step, kv_head, lowest, left, right, score_factor, cap_factor,
        FORMAT, BLOCK_SIZE, HEAD_DIM, DIM, REST, REST_DIM, V_HEAD_DIM, V_DIM, STORED_DIM, V_STORED_DIM, TILE_N, WINDOW,
        CAPPED, False, COMPUTE, PRECISION,
    )  # fmt: skip
    maximum, total, acc = attend(
        q, q_rest, position, maximum, total, acc, k, v, key_scales, value_scales, table,
        block_step, scales_step, kv_head, lowest, right, end, score_factor, cap_factor,
        FORMAT, BLOCK_SIZE, HEAD_DIM, DIM, REST, REST_DIM, V_HEAD_DIM, V_DIM, STORED_DIM, V_STORED_DIM, TILE_N, WINDOW,
        CAPPED, True, COMPUTE, PRECISION,
    )  # fmt: skip
    dim = tl.arange(0, V_DIM)
    result = acc / total[:, None]
    place = row[:, None] * out_step + head[:, None] * V_HEAD_DIM + dim[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=real[:, None] & (dim < V_HEAD_DIM)[None, :])


def prefill(
    query: Tensor, out: Tensor, shape: KernelShape, layer: LayerKv, tables: Tensor, tiles: Tensor, tiling: Tiling
) -> None:
    """Compute the attention of prompts into `out`. Rows that no tile names stay as they are.

    query: [tokens, heads, qk_dim], out: [tokens, heads, v_dim], rows contiguous. tables: [sequences, blocks] int32. tiles:
    [tiles, 4] int32 (see `prefill_kernel`), made by `cut` with `tile_tokens`.
    """
    assert_sound(shape, query.dtype, tiling)
    prefill_kernel[(shape.programs(tiling.rows), len(tiles))](
        out, query, layer.key, layer.value, layer.key_scales, layer.value_scales, tables, tiles,
        *shape.factors, tables.stride(0), query.stride(0), out.stride(0), layer.block_step, layer.scales_step,
        TILE_M=tiling.rows, TILE_N=tiling.positions, **shape.constants(tiling.rows),
        COMPUTE=dot_dtype(query), PRECISION=dot_precision(query.dtype), num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip


def tile_tokens(tiling: Tiling, group: int) -> int:
    """Return the number of tokens in one query tile. A tile of a larger group has some of the heads of one token."""
    return max(1, tiling.rows // group)


def cut(row: int, start: int, count: int, sequence: int, tokens: int) -> list[tuple[int, int, int, int]]:
    """Cut one sequence's tokens [start, start + count), which are query rows from `row` on, into tiles of `tokens`."""
    return [(sequence, row + done, start + done, min(tokens, count - done)) for done in range(0, count, tokens)]


def tiles_tensor(tiles: list[tuple[int, int, int, int]]) -> Tensor:
    """Return the tiles as [tiles, 4] int32, longest past first, so that the last program to start is a short one."""
    return torch.tensor(sorted(tiles, key=lambda tile: -tile[2]), dtype=torch.int32).view(-1, TILE_FIELDS)
