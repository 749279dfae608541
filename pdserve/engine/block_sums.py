"""Checksums of KV blocks in place, by the fastest code that this machine has. `pdserve.engine.kv.checksum` defines them.

The compiled one is a library of its own, because unlike the kernels it is compiled for any CPU. It finds out by itself which
vectors this CPU has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from pdserve.core.ids import BlockSum
from pdserve.engine.kernels.support import triton_usable
from pdserve.engine.kv.checksum import combine, sums_in_numpy
from pdserve.engine.native.library import installed

BEST: Final = 0
"""The fastest way of summing that this CPU has. The other ways are 1 (plain C++), 2 (AVX2) and 3 (AVX-512). All give the same
bits."""


class NativeSums(Protocol):
    """The compiled function.

    region: the address of the blocks. ids: the address of `count` int64 block ids. sums: the address of room for `count`
    uint64 sums.
    """

    def __call__(self, region: int, block_bytes: int, ids: int, count: int, sums: int, way: int = BEST) -> bool:
        """Write the checksums. False means that this CPU lacks the requested way, and nothing is written."""
        ...


@cache
def load_sums() -> NativeSums | None:
    """Return the compiled checksum of blocks; None when the library was not built or is older. It runs on any CPU."""
    path = installed("_sums")
    if path is None:
        return None
    try:
        function = ctypes.CDLL(str(path)).pdserve_block_sums
    except (OSError, AttributeError):
        return None
    function.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int)
    function.restype = c_int

    def sum_blocks(region: int, block_bytes: int, ids: int, count: int, sums: int, way: int = BEST) -> bool:
        return bool(function(region, block_bytes, ids, count, sums, way))

    return sum_blocks


class BlockSums:
    """Computes checksums of blocks of one region of memory, [blocks, block_bytes] uint8, which must stay in place.

    Several threads may call it at once. On CUDA it runs in the calling thread's current stream. With `beside` it runs in a
    separate stream and does not wait for steps of the model; this is only for blocks that no stream writes.
    """

    def __init__(self, blocks: Tensor, *, beside: bool = False) -> None:
        assert blocks.dtype == torch.uint8
        assert blocks.is_contiguous()
        self._blocks = blocks
        on_cuda = blocks.device.type == "cuda"
        self._stream = torch.cuda.Stream(blocks.device) if beside and on_cuda else None  # type: ignore[no-untyped-call]
        self._compiled = load_sums() if blocks.device.type == "cpu" else None

    def __call__(self, block_ids: Sequence[int], /) -> tuple[BlockSum, ...]:
        """Return the checksums of the named blocks, in order. Asserts that each id is below the number of blocks."""
        if not block_ids:
            return ()
        assert min(block_ids) >= 0
        assert max(block_ids) < len(self._blocks)
        if self._compiled is not None:
            return self._in_compiled_code(block_ids)
        if triton_usable(self._blocks.device):
            return self._in_triton(block_ids)
        return sums_in_numpy(self._blocks[list(block_ids)].cpu().numpy())

    def _in_triton(self, block_ids: Sequence[int]) -> tuple[BlockSum, ...]:
        """Sum stripes on the GPU and combine them on the CPU. Copying the stripe sums back waits for the kernel."""
        from pdserve.engine.kernels.block_sums import stripe_sums

        with torch.cuda.stream(self._stream):  # with None, the current stream stays
            stripes = stripe_sums(self._blocks, torch.tensor(block_ids, device=self._blocks.device)).cpu()
        return combine(stripes.numpy().view(np.uint64), self._blocks.shape[1])

    def _in_compiled_code(self, block_ids: Sequence[int]) -> tuple[BlockSum, ...]:
        """Call the compiled code. ctypes releases the GIL during the call."""
        assert self._compiled is not None
        ids = np.array(block_ids, np.int64)
        sums = np.empty(len(ids), np.uint64)
        self._compiled(self._blocks.data_ptr(), self._blocks.shape[1], ids.ctypes.data, len(ids), sums.ctypes.data)
        return tuple(BlockSum(value) for value in sums.tolist())
