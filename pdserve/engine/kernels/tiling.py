"""Tile shapes of the attention kernels, and what their matrix products compute in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton.language as tl
from torch import Tensor

from pdserve.engine.kernels.support import next_power_of_2

_COMPUTE: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True, slots=True)
class Tiling:
    """rows: of queries, at least 16 and a power of two; positions: of K and V, likewise; warps and pipeline stages."""

    rows: int
    positions: int
    warps: int
    stages: int


def prefill_tiling(head_dim: int, dtype: torch.dtype, group: int) -> Tiling:
    """For 227 KiB of shared memory and 64 Ki registers a multiprocessor (Hopper), of which this was compiled for sm_90a:

    - 128 dimensions, bfloat16: (rows + 2 * stages * positions) * dimensions * 2 B = 128 KiB, about 195 registers in each of
      256 threads: one program runs on a multiprocessor at a time. Two of half the rows would fit, but then K and V come
      from L2 twice as often: 7.7 TB/s at half the peak of the products, likely more than an H200's L2 gives.
    - 64 dimensions: 64 KiB and at most 128 registers: two programs, of which one takes exponentials (at 16 a cycle about
      as long as the products, at this size) while the other multiplies. Quantised numbers need 180 to 230: one program.
    - 256 dimensions: 160 KiB and about 250 registers: one program; quantised numbers spill up to 16 B a thread.

    float32 is for checking: tiles small enough for its products, which tensor cores do not take.
    """
    dim = next_power_of_2(head_dim)
    if dtype is torch.float32:
        return Tiling(max(32 if dim <= 128 else 16, next_power_of_2(group)), 16, 4, 1)
    return Tiling(max(128, next_power_of_2(group)), 64 if dim <= 128 else 32, 8, 3)


def decode_tiling(head_dim: int, dtype: torch.dtype, group: int) -> Tiling:
    """One token: as many rows as the group has heads, at least the 16 that tensor cores multiply at once.

    128 dimensions, bfloat16: two tiles of K and V are on their way or at work, 64 KiB, and at most 128 registers in each of
    128 threads, so three programs fit on a multiprocessor. `choose_splits` gives it two: one tile of each is 64 KiB on
    the way; 4.8 TB/s at a latency of 1 us need 36 KiB a multiprocessor.
    """
    dim = next_power_of_2(head_dim)
    rows = max(16, next_power_of_2(group))
    if dtype is torch.float32:
        return Tiling(rows, 16, 4, 1)
    return Tiling(rows, 64 if dim <= 128 else 32, 4, 3)


def dot_dtype(query: Tensor) -> Any:
    """What products are taken in: the query's dtype. The interpreter, on CPU, has no bfloat16 products: float32 there."""
    if query.device.type == "cpu" and query.dtype is torch.bfloat16:
        return tl.float32
    return _COMPUTE[query.dtype]


def dot_precision(dtype: torch.dtype) -> str:
    """float32 is chosen for exactness, so its products are not rounded to TF32; otherwise the setting has no effect."""
    return "ieee" if dtype is torch.float32 else "tf32"
