"""Tile shapes of the attention kernels, and the dtype of their matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton.language as tl
from torch import Tensor

from pdserve.engine.kernels.shape import KernelShape, padded
from pdserve.engine.kernels.support import next_power_of_2
from pdserve.engine.kv.paged import KvFormat

_COMPUTE: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
INT4_POSITIONS: Final = 64
"""The fewest positions of a tile of int4 with fewer than WGMMA_ROWS rows. There Triton 3.6 gives each thread eight neighbouring
positions, since eight int4 fill 32 bits, and its 16-bit products are wrong when a tile has fewer than the threads want."""
WGMMA_ROWS: Final = 64
"""The fewest rows that Hopper's own matrix products take."""
FLOAT32_BYTES: Final = 4
REGISTER_BYTES: Final = 64 * 1024 * 4  # of a multiprocessor


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of one tile and of the program that computes it.

    rows: query rows. positions: positions of K and V. Both are powers of two and at least 16. warps: warps of a program.
    stages: stages of the software pipeline.
    """

    rows: int
    positions: int
    warps: int
    stages: int


def prefill_tiling(shape: KernelShape, dtype: torch.dtype) -> Tiling:
    """Return the tiling of prefill, chosen for Hopper: 227 KiB of shared memory and 64 Ki registers a multiprocessor.

    The numbers are those of the kernels compiled for sm_90a:

    - 128 dimensions, bfloat16: (rows + 2 * stages * positions) * dimensions * 2 B = 128 KiB and about 195 registers in each
      of 256 threads. One program runs on a multiprocessor at a time. Two programs of half the rows would fit, but then K
      and V come from L2 twice as often: 7.7 TB/s at half the peak of the products, likely more than an H200's L2 gives.
    - 64 dimensions: 64 KiB and at most 128 registers. Two programs run at a time: one computes exponentials (16 a cycle,
      which takes about as long as the products at this size) while the other multiplies. Quantised numbers need 180 to 230
      registers, so there one program runs.
    - 256 dimensions: 160 KiB and about 250 registers. One program runs; quantised numbers spill up to 16 B a thread.
    - latent keys: see `_latent_tiling`. A prompt fills 64 rows with several tokens, if heads do not. Two tiles of 64 keys and
      one of queries are 216 KiB. On an H100, 2,048 tokens of DeepSeek-V3 take 2.2 ms (three tiles of 32 keys: 2.9), and those
      of DeepSeek-V2-Lite 0.29 ms (16 rows of one token: 0.83).

    float32 serves only for checks. Its tiles are small, because tensor cores do not compute float32 products.
    """
    if shape.latent:
        plain = shape.format is KvFormat.PLAIN and dtype is not torch.float32
        return Tiling(64, 64, 8, 2) if plain else _latent_tiling(shape, dtype, 32)
    dim, rows = _dim(shape), next_power_of_2(shape.group)
    if dtype is torch.float32:
        return Tiling(max(32 if dim <= 128 else 16, rows), 16, 4, 1)
    return Tiling(max(128, rows), 64 if dim <= 128 else 32, 8, 3)


def decode_tiling(shape: KernelShape, dtype: torch.dtype) -> Tiling:
    """Return the tiling of decode: one token, so a row for each head of the group, at least the 16 of a tensor core.

    128 dimensions, bfloat16: two tiles of K and V are being loaded or used, which is 64 KiB, and each of 128 threads has at
    most 128 registers, so three programs fit on a multiprocessor. `choose_splits` gives it two. When each program loads one
    tile, 64 KiB are on their way; 4.8 TB/s at a latency of 1 us need 36 KiB a multiprocessor.

    Quantised numbers have half or a quarter of the bytes, so twice as many positions are as many bytes on their way. On an H100
    the layer of 32 sequences of 2,048 positions then takes 66 us instead of 83 in int8, 65 instead of 82 in fp8, and 86 instead
    of 92 in int4.
    """
    if shape.latent:
        return _latent_tiling(shape, dtype, padded(shape.group))
    rows = padded(shape.group)
    if dtype is torch.float32:
        return Tiling(rows, 16, 4, 1)
    positions = 64 if _dim(shape) <= 128 else 32
    return Tiling(rows, positions if shape.format is KvFormat.PLAIN else 2 * positions, 4, 3)


def _latent_tiling(shape: KernelShape, dtype: torch.dtype, rows: int) -> Tiling:
    """Return the tiling of latent attention, in which all query heads share one key of hundreds of numbers.

    rows: the most that are of use. DeepSeek's 512 + 64 numbers in bfloat16, 256 threads:

    - 64 rows: their sums are 128 KiB, half of all registers, so more rows are several tiles. Three tiles of 32 keys and one of
      queries are 180 KiB. One program runs. It keeps about 130 B a thread of addresses on the stack.
    - 16 rows: 91 KiB and at most 128 registers, so two programs run.
    - Quantised keys pass through registers, so a tile has at most 32 rows.
    """
    if dtype is torch.float32:
        return Tiling(16, 16, 4, 1)
    positions = INT4_POSITIONS if shape.format is KvFormat.INT4 else 32
    return Tiling(min(64 if shape.format is KvFormat.PLAIN else 32, rows), positions, 8, 3)


def assert_sound(shape: KernelShape, dtype: torch.dtype, tiling: Tiling) -> None:
    """Assert that the compiler computes this tile right, see `INT4_POSITIONS`."""
    if shape.format is KvFormat.INT4 and dtype is not torch.float32:
        assert tiling.rows >= WGMMA_ROWS or tiling.positions >= INT4_POSITIONS


def programs_at_a_time(shape: KernelShape, tiling: Tiling) -> int:
    """Return how many programs of decode a multiprocessor is to run at a time. One whose sums take half of all registers runs
    alone: with two, an H100 needs 151 us instead of 109 for 32 sequences of DeepSeek-V3.
    """
    return 1 if tiling.rows * padded(shape.v_dim) * FLOAT32_BYTES >= REGISTER_BYTES // 2 else 2


def _dim(shape: KernelShape) -> int:
    return max(padded(shape.qk_dim), padded(shape.v_dim))


def dot_dtype(query: Tensor) -> Any:
    """Return the dtype of the matrix products: the query's, or float32 for bfloat16 on the CPU.

    The interpreter, which runs kernels on the CPU, has no bfloat16 products.
    """
    if query.device.type == "cpu" and query.dtype is torch.bfloat16:
        return tl.float32
    return _COMPUTE[query.dtype]


def dot_precision(dtype: torch.dtype) -> str:
    """Return the setting that keeps float32 products from being rounded to TF32. It has no effect on other dtypes."""
    return "ieee" if dtype is torch.float32 else "tf32"
