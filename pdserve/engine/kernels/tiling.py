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
    """For shared memory of 227 KiB and 64 Ki registers a multiprocessor (Hopper).

    Bytes of shared memory: (rows + 2 * (stages - 1) * positions) * padded head_dim * element size; 128 x 64 at 128
    dimensions in bfloat16 with three stages: 96 KiB, so two programs fit. Of shapes tried, these spill no registers when
    compiled for sm_90. float32 is for checking: tiles small enough for its products, which tensor cores do not take.
    """
    dim = next_power_of_2(head_dim)
    if dtype is torch.float32:
        return Tiling(max(32 if dim <= 128 else 16, next_power_of_2(group)), 16, 4, 1)
    if dim <= 64:
        return Tiling(max(128, next_power_of_2(group)), 128, 8, 3)
    if dim <= 128:
        return Tiling(max(128, next_power_of_2(group)), 64, 8, 3)
    return Tiling(max(64, next_power_of_2(group)), 32, 4, 2)


def decode_tiling(head_dim: int, dtype: torch.dtype, group: int) -> Tiling:
    """One token: as many rows as the group has heads, at least the 16 that tensor cores multiply at once."""
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
