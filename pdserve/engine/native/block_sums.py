"""The compiled checksum of KV blocks. It is a library of its own, because unlike the kernels it is compiled for any CPU. It
finds out by itself which vectors this CPU has.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from typing import Final, Protocol

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
