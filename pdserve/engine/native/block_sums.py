"""The compiled checksum of KV blocks. A library of its own: unlike the kernels it is compiled for any CPU, and looks by itself
which vectors this one has.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from typing import Final, Protocol

from pdserve.engine.native.library import installed

BEST: Final = 0
"""The fastest way of summing that this CPU has; 1 plain C++, 2 AVX2, 3 AVX-512: the same bits from each."""


class SumBlocks(Protocol):
    """Addresses: of the region, of int64 ids, of room for as many uint64 sums."""

    def __call__(self, region: int, block_bytes: int, ids: int, count: int, sums: int, way: int = BEST) -> bool:
        """False: this CPU has no such way."""
        ...


@cache
def load_sums() -> SumBlocks | None:
    """The checksum of blocks, which any CPU has. None where the library was not built, or is older."""
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
