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

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.engine.kernels.flash import attend
from pdserve.engine.kernels.support import next_power_of_2
from pdserve.engine.kernels.tiling import Tiling, dot_dtype, dot_precision
from pdserve.engine.kv.paged import LayerKv, PagedKv

MIN_SPLIT = 256  # positions: in a smaller split, its start and its merge cost more than the reads that it takes over
MAX_SPLITS = 128  # bounds the tile of the merge


@triton.jit(do_not_specialize=["table_step"])  # the width of the tables changes from step to step
def decode_kernel(
    out, partial, states, query, key, value, key_scales, value_scales, tables, rows, ends,
    scale_log2, table_step, query_step, out_step, block_step, head_step, scales_step,
    SPLITS: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, STORED_DIM: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, WINDOW: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (num_kv_heads, sequences, SPLITS).

    rows: [sequences] int32, the row of each sequence in query. ends: [sequences] int32, its number of positions, the new
    token included; 0 marks an empty row: nothing is read and zeros are written.

    A single split writes to out [tokens, heads, HEAD_DIM]. Several splits write their sums to partial [sequences, heads,
    SPLITS, HEAD_DIM], and maximum and total to states [sequences, heads, SPLITS, 2], both float32. An empty split writes
    only its state.
    """
    kv_head = tl.program_id(0)
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
    dim = tl.arange(0, DIM)
    head = kv_head * GROUP + m
    mask = (m < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    column = head[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(query + row * query_step + column, mask=mask, other=0.0).to(COMPUTE)
    maximum, total, acc = attend(
        q, tl.zeros([TILE_M], tl.int32) + (end - 1),
        tl.full([TILE_M], float("-inf"), tl.float32), tl.zeros([TILE_M], tl.float32), tl.zeros([TILE_M, DIM], tl.float32),
        key + kv_head.to(tl.int64) * head_step, value + kv_head.to(tl.int64) * head_step, key_scales, value_scales,
        tables + sequence.to(tl.int64) * table_step,
        block_step, scales_step, kv_head, lowest, begin, stop, scale_log2,
        FORMAT, BLOCK_SIZE, HEAD_DIM, DIM, STORED_DIM, TILE_N, WINDOW, True, COMPUTE, PRECISION,
    )  # fmt: skip
    if SPLITS == 1:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(out + row * out_step + column, result.to(out.dtype.element_ty), mask=mask)
    else:
        heads = tl.num_programs(0) * GROUP
        place = (sequence.to(tl.int64) * heads + head) * SPLITS + split
        tl.store(states + place * 2, maximum, mask=m < GROUP)
        tl.store(states + place * 2 + 1, total, mask=m < GROUP)
        kept = tl.where(begin < stop, GROUP, 0)
        tl.store(partial + place[:, None] * HEAD_DIM + dim[None, :], acc, mask=mask & (m < kept)[:, None])


@triton.jit
def merge_kernel(
    out, partial, states, rows, out_step,
    SPLITS: tl.constexpr, SPLITS_PADDED: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Grid (heads, sequences): each program rescales the splits of one head to one maximum, sums and divides them."""
    head = tl.program_id(0)
    sequence = tl.program_id(1)
    place = (sequence.to(tl.int64) * tl.num_programs(0) + head) * SPLITS
    split = tl.arange(0, SPLITS_PADDED)
    dim = tl.arange(0, DIM)
    maximum = tl.load(states + (place + split) * 2, mask=split < SPLITS, other=float("-inf"))
    total = tl.load(states + (place + split) * 2 + 1, mask=split < SPLITS, other=0.0)
    highest = tl.max(maximum, 0)
    keep = tl.where(total > 0, tl.exp2(maximum - tl.where(highest == float("-inf"), 0.0, highest)), 0.0)
    # An empty split wrote no sum, so its memory is not read.
    mask = (total > 0)[:, None] & (dim < HEAD_DIM)[None, :]
    sums = tl.load(partial + (place + split)[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    whole = tl.sum(total * keep, 0)
    result = tl.sum(sums * keep[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    row = tl.load(rows + sequence).to(tl.int64)
    tl.store(out + row * out_step + head * HEAD_DIM + dim, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def decode(
    query: Tensor, out: Tensor, kv: PagedKv, layer: LayerKv, tables: Tensor, rows: Tensor, ends: Tensor,
    splits: int, tiling: Tiling, window: int = 0,
) -> None:  # fmt: skip
    """Compute the attention of single tokens into `out`. Rows that `rows` does not name stay as they are.

    query, out: [tokens, num_heads, head_dim], rows contiguous. tables: [sequences, blocks] int32. rows, ends: [sequences]
    int32 (see `decode_kernel`). window: positions that a token sees, its own included; 0 means all.
    """
    heads = query.shape[1]
    shape = (len(rows), heads, splits) if splits > 1 else (0, 0, 0)
    partial = torch.empty((*shape, kv.head_dim), dtype=torch.float32, device=query.device)
    states = torch.empty((*shape, 2), dtype=torch.float32, device=query.device)
    dim = next_power_of_2(kv.head_dim)
    decode_kernel[(kv.num_kv_heads, len(rows), splits)](
        out, partial, states, query, layer.key, layer.value, layer.key_scales, layer.value_scales, tables, rows, ends,
        1.0 / (math.sqrt(kv.head_dim) * math.log(2)), tables.stride(0), query.stride(0), out.stride(0),
        layer.block_step, layer.head_step, layer.scales_step,
        SPLITS=splits, FORMAT=int(kv.format), GROUP=heads // kv.num_kv_heads, BLOCK_SIZE=kv.block_size,
        HEAD_DIM=kv.head_dim, DIM=dim, STORED_DIM=kv.data.shape[-1], TILE_M=tiling.rows, TILE_N=tiling.positions,
        WINDOW=window, COMPUTE=dot_dtype(query), PRECISION=dot_precision(query.dtype),
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if splits > 1:
        merge_kernel[(heads, len(rows))](
            out, partial, states, rows, out.stride(0),
            SPLITS=splits, SPLITS_PADDED=next_power_of_2(splits), HEAD_DIM=kv.head_dim, DIM=dim, num_warps=4,
        )  # fmt: skip


def choose_splits(sequences: int, num_kv_heads: int, longest: int, multiprocessors: int) -> int:
    """Return a number of splits that gives each multiprocessor about two programs.

    A split has at least MIN_SPLIT positions of the longest sequence. The number is a power of two, because each number of
    splits is a kernel of its own to compile.
    """
    wanted = 2 * multiprocessors // max(1, sequences * num_kv_heads)
    splits = max(1, min(wanted, longest // MIN_SPLIT, MAX_SPLITS))
    return 1 << (splits.bit_length() - 1)
