"""Checksums of KV blocks in place, by the fastest code that this machine has. `pdserve.engine.kv.checksum` defines them.

The compiled one is a library of its own, because unlike the kernels it is compiled for any CPU. It finds out by itself which
vectors this CPU has.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from pdserve.core.ids import BlockSum
from pdserve.engine.kernels.support import triton_usable
from pdserve.engine.kv.checksum import Integers, Stripes, Words, sums_in_numpy
from pdserve.engine.native.library import installed

BEST: Final = 0
"""The fastest way of summing that this CPU has. The other ways are 1 (plain C++), 2 (AVX2) and 3 (AVX-512). All give the same
bits."""


class NativeSums(Protocol):
    """The compiled function."""

    def __call__(self, region: int, block_bytes: int, ids: Integers, stripes: Stripes, way: int = BEST) -> Words | None:
        """Return the checksums [ids] of blocks of the region at this address. None: this CPU lacks the requested way."""
        ...


@cache
def load_sums() -> NativeSums | None:
    """Return the compiled checksum of blocks; None when the library was not built or is older. It runs on any CPU."""
    path = installed("_sums")
    if path is None:
        return None
    try:
        function = ctypes.CDLL(str(path)).pdserve_stripe_sums
    except (OSError, AttributeError):
        return None
    function.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int)
    function.restype = c_int

    def sum_blocks(region: int, block_bytes: int, ids: Integers, stripes: Stripes, way: int = BEST) -> Words | None:
        sums = np.empty(len(ids), np.uint64)
        table = (column.ctypes.data for column in (stripes.offset, stripes.nbytes, stripes.key))
        found = function(region, block_bytes, ids.ctypes.data, len(ids), *table, len(stripes.key), sums.ctypes.data, way)
        return sums if found else None

    return sum_blocks


class BlockSums:
    """Computes checksums of blocks of one region of memory, [blocks, block_bytes] uint8, which must stay in place.

    `stripes` says what is summed of each block: all of it (`stripes_of` its layout), or the part that a rank has. None: all of
    it, as bytes without a layout. Several threads may call it at once. On CUDA it runs in the calling thread's current stream.
    With `beside` it runs in a separate stream and does not wait for steps of the model; this is only for blocks that no stream
    writes.
    """

    def __init__(self, blocks: Tensor, stripes: Stripes | None = None, *, beside: bool = False) -> None:
        assert blocks.dtype == torch.uint8
        assert blocks.is_contiguous()
        self._blocks = blocks
        self._stripes = Stripes.plain(blocks.shape[1]) if stripes is None else stripes
        assert self._stripes.lie_in(blocks.shape[1])
        on_cuda = blocks.device.type == "cuda"
        self._stream = torch.cuda.Stream(blocks.device) if beside and on_cuda else None  # type: ignore[no-untyped-call]
        self._compiled = load_sums() if blocks.device.type == "cpu" else None
        self._kernel = _kernel_of(blocks, self._stripes) if triton_usable(blocks.device) else None

    def __call__(self, block_ids: Sequence[int], /) -> tuple[BlockSum, ...]:
        """Return the checksums of the named blocks, in order. Asserts that each id is below the number of blocks."""
        if not block_ids:
            return ()
        assert min(block_ids) >= 0
        assert max(block_ids) < len(self._blocks)
        if self._compiled is not None:
            # ctypes releases the GIL during the call.
            address, block_bytes = self._blocks.data_ptr(), self._blocks.shape[1]
            sums = self._compiled(address, block_bytes, np.array(block_ids, np.int64), self._stripes)
            assert sums is not None
        elif self._kernel is not None:
            with torch.cuda.stream(self._stream):  # with None, the current stream stays
                # Copying the sums back waits for the kernel.
                sums = self._kernel(torch.tensor(block_ids, device=self._blocks.device)).cpu().numpy().view(np.uint64)
        else:
            return sums_in_numpy(self._blocks[list(block_ids)].cpu().numpy(), self._stripes)
        return tuple(BlockSum(value) for value in sums.tolist())


def _kernel_of(blocks: Tensor, stripes: Stripes) -> Callable[[Tensor], Tensor] | None:
    """Return the kernel. None: the bytes do not lie as it needs them, and numpy sums them."""
    from pdserve.engine.kernels.block_sums import KernelSums

    return KernelSums(blocks, stripes) if KernelSums.takes(blocks, stripes) else None
