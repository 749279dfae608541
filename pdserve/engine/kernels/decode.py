"""Attention of decode: one token of each sequence against its whole past, which is cut into splits that run in parallel.

Floor: each byte of K and V is read once: 2 * num_kv_heads * head_dim * element size a position and layer. Llama-3-8B in
bfloat16: 4 KiB; 32 sequences at 2,048 positions 8.6 GB over all layers, 1.8 ms at an H200's 4.8 TB/s. There are only
2 * group operations a byte, so the 16 rows of a tensor core may be mostly padding.

One program for each sequence and KV head would leave most of 132 multiprocessors idle at batch 1. FlashDecoding (Dao,
Haziza, Massa, Sizov 2023) cuts the past into splits, writes the unfinished sum, maximum and total of each, and merges them
in a second kernel. The merge moves splits * (head_dim + 2) * 4 B a head: 2 % of K and V at 512 positions a split, a group
of four and 128 dimensions. The caller chooses the number of splits, so a launch does not depend on the lengths and can be
recorded in a CUDA graph. The kernel computes the share of a split from the sequence's own length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.kernels.flash import attend, load_query
from pdserve.engine.kernels.shape import KernelShape, padded
from pdserve.engine.kernels.support import next_power_of_2
from pdserve.engine.kernels.tiling import Tiling, assert_sound, dot_dtype, dot_precision
from pdserve.engine.kv.paged import LayerKv

MIN_SPLIT = 256  # positions: in a smaller split, its start and its merge cost more than the reads that it takes over
MAX_SPLITS = 128  # bounds, with MERGED, the tile of the merge
MERGED = 128  # columns of a program that merges


@triton.jit(do_not_specialize=["table_step"])  # the width of the tables changes from step to step
def decode_kernel(
    out, partial, states, query, key, value, key_scales, value_scales, tables, rows, ends,
    score_factor, cap_factor, table_step, query_step, out_step, block_step, scales_step,
    SPLITS: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr, REST_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    V_DIM: tl.constexpr, STORED_DIM: tl.constexpr, V_STORED_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    WINDOW: tl.constexpr, CAPPED: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of heads, sequences, SPLITS). A tile has HEADS of the GROUP heads that share a KV head.

    rows: [sequences] int32, the row of each sequence in query. ends: [sequences] int32, its number of positions, the new
    token included; 0 marks an empty row: nothing is read and zeros are written. The other arguments are those of `attend`.

    A single split writes to out [tokens, heads, V_HEAD_DIM]. Several splits write their sums to partial [sequences, heads,
    SPLITS, V_HEAD_DIM], and maximum and total to states [sequences, heads, SPLITS, 2], both float32. An empty split writes
    only its state.
    """
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(0) // TILES
    sequence = tl.program_id(1)
    split = tl.program_id(2)
    end = tl.load(ends + sequence)
    row = tl.load(rows + sequence).to(tl.int64)
    lowest = 0
    if WINDOW > 0:
        lowest = tl.maximum(end - WINDOW, 0)
    first_tile = lowest // TILE_N
    share = tl.cdiv(tl.cdiv(end, TILE_N) - first_tile, SPLITS)
    begin = (first_tile + split * share) * TILE_N
    stop = tl.minimum(begin + share * TILE_N, end)

    m = tl.arange(0, TILE_M)
    dim = tl.arange(0, V_DIM)
    of_group = (tl.program_id(0) % TILES) * HEADS + m
    real = (m < HEADS) & (of_group < GROUP)
    head = kv_head * GROUP + of_group
    q, q_rest = load_query(
        query, tl.zeros([TILE_M], tl.int64) + row, head, real, query_step, HEAD_DIM, DIM, REST, REST_DIM, COMPUTE
    )
    maximum, total, acc = attend(
        q, q_rest, tl.zeros([TILE_M], tl.int32) + (end - 1),
        tl.full([TILE_M], float("-inf"), tl.float32), tl.zeros([TILE_M], tl.float32), tl.zeros([TILE_M, V_DIM], tl.float32),
        key + kv_head.to(tl.int64) * (BLOCK_SIZE * STORED_DIM), value + kv_head.to(tl.int64) * (BLOCK_SIZE * V_STORED_DIM),
        key_scales, value_scales, tables + sequence.to(tl.int64) * table_step,
        block_step, scales_step, kv_head, lowest, begin, stop, score_factor, cap_factor,
        FORMAT, BLOCK_SIZE, HEAD_DIM, DIM, REST, REST_DIM, V_HEAD_DIM, V_DIM, STORED_DIM, V_STORED_DIM, TILE_N, WINDOW, CAPPED,
        True, COMPUTE, PRECISION,
    )  # fmt: skip
    mask = real[:, None] & (dim < V_HEAD_DIM)[None, :]
    if SPLITS == 1:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        place = row * out_step + head[:, None] * V_HEAD_DIM + dim[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)
    else:
        heads = tl.num_programs(0) // TILES * GROUP
        place = (sequence.to(tl.int64) * heads + head) * SPLITS + split
        tl.store(states + place * 2, maximum, mask=real)
        tl.store(states + place * 2 + 1, total, mask=real)
        kept = tl.where(begin < stop, TILE_M, 0)
        tl.store(partial + place[:, None] * V_HEAD_DIM + dim[None, :], acc, mask=mask & (m < kept)[:, None])


@triton.jit
def merge_kernel(
    out, partial, states, rows, out_step,
    SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr, V_HEAD_DIM: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (heads, sequences, columns / TILE): each program rescales the splits of one head to one maximum, sums and divides
    TILE columns of them.
    """
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    place = (sequence.to(tl.int64) * tl.num_programs(0) + head) * SPLITS
    split = tl.arange(0, SPLITS_PADDED)
    dim = tl.program_id(2) * TILE + tl.arange(0, TILE)
    maximum = tl.load(states + (place + split) * 2, mask=split < SPLITS, other=float("-inf"))
    total = tl.load(states + (place + split) * 2 + 1, mask=split < SPLITS, other=0.0)
    highest = tl.max(maximum, 0)
    keep = tl.where(total > 0, tl.exp2(maximum - tl.where(highest == float("-inf"), 0.0, highest)), 0.0)
    # An empty split wrote no sum, so its memory is not read.
    mask = (total > 0)[:, None] & (dim < V_HEAD_DIM)[None, :]
    sums = tl.load(partial + (place + split)[:, None] * V_HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    whole = tl.sum(total * keep, 0)
    result = tl.sum(sums * keep[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    row = tl.load(rows + sequence).to(tl.int64)
    tl.store(out + row * out_step + head * V_HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < V_HEAD_DIM)


def decode(
    query: Tensor, out: Tensor, shape: KernelShape, layer: LayerKv, tables: Tensor, rows: Tensor, ends: Tensor,
    splits: int, tiling: Tiling,
) -> None:  # fmt: skip
    """Compute the attention of single tokens into `out`. Rows that `rows` does not name stay as they are.

    query: [tokens, heads, qk_dim], out: [tokens, heads, v_dim], rows contiguous. tables: [sequences, blocks] int32. rows,
    ends: [sequences] int32 (see `decode_kernel`).
    """
    assert_sound(shape, query.dtype, tiling)
    parts = (len(rows), shape.heads, splits) if splits > 1 else (0, 0, 0)
    partial = torch.empty((*parts, shape.v_dim), dtype=torch.float32, device=query.device)
    states = torch.empty((*parts, 2), dtype=torch.float32, device=query.device)
    decode_kernel[(shape.programs(tiling.rows), len(rows), splits)](
        out, partial, states, query, layer.key, layer.value, layer.key_scales, layer.value_scales, tables, rows, ends,
        *shape.factors, tables.stride(0), query.stride(0), out.stride(0), layer.block_step, layer.scales_step,
        SPLITS=splits, TILE_M=tiling.rows, TILE_N=tiling.positions, **shape.constants(tiling.rows),
        COMPUTE=dot_dtype(query), PRECISION=dot_precision(query.dtype), num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if splits > 1:
        tile = min(MERGED, padded(shape.v_dim))
        merge_kernel[(shape.heads, len(rows), triton.cdiv(shape.v_dim, tile))](
            out, partial, states, rows, out.stride(0),
            SPLITS=splits, SPLITS_PADDED=next_power_of_2(splits), V_HEAD_DIM=shape.v_dim, TILE=tile, num_warps=4,
        )  # fmt: skip


def choose_splits(sequences: int, programs: int, longest: int, at_a_time: int) -> int:
    """Return a number of splits with about `at_a_time` programs, which the device runs at a time. A sequence takes `programs` a
    split.

    A split has at least MIN_SPLIT positions of the longest sequence. The number is a power of two, because each number of
    splits is a kernel of its own to compile.
    """
    wanted = at_a_time // max(1, sequences * programs)
    splits = max(1, min(wanted, longest // MIN_SPLIT, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)
