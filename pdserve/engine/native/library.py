"""The compiled kernels: found beside this file, declared for ctypes, tried once.

Built when pdserve is installed, where there is a compiler (`pyproject.toml`). A plain C interface over addresses needs
none of torch's headers, compiles in five seconds and works with any torch. Its threads are its own: torch's OpenMP
threads spin after each parallel region, which on two cores costs the next one its core.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_int, c_int64, c_void_p
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from struct import Struct
from typing import Final, Protocol

_ABI: Final = 4  # of abi.h


class Shape(Structure):
    """`PdShape` of abi.h."""

    _fields_ = [
        *((name, c_int64) for name in ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab")),
        ("rms_norm_eps", c_double),
    ]  # fmt: skip


class Step(Structure):
    """`PdStep` of abi.h."""

    _fields_ = [
        *((name, c_int64) for name in ("threads", "rows", "spans", "out_rows")),
        *((name, c_void_p) for name in ("token_ids", "span_start", "span_count", "span_table", "tables", "out", "pool")),
        *((name, c_int64) for name in ("block_size", "blocks", "kv_format")),
        *((name, c_void_p) for name in ("rope", "logits", "best")),
    ]  # fmt: skip


# `PdRow` of abi.h, in two parts, of which the second may stay zero: a packed row costs a quarter of a ctypes structure.
ROW_DRAW: Final = Struct("@qqdddQQ")  # row, top_k, temperature, top_p, min_p, seed, index
ROW_MORE: Final = Struct("@PPqPPqdddPqPPq")  # bias, seen, penalties, banned, logprobs
ROW_BYTES: Final = ROW_DRAW.size + ROW_MORE.size


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
    path = _path()
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


def _path() -> Path | None:
    here = Path(__file__).parent
    return next((p for suffix in EXTENSION_SUFFIXES if (p := here / f"_kernels{suffix}").is_file()), None)


@cache
def load() -> ctypes.CDLL | None:
    """None where the library was not built or this CPU lacks AVX-512 with bfloat16 and VNNI."""
    path = _path()
    if path is None:
        return None
    try:
        library = _declare(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):  # of another platform or version
        return None
    return library if library.pdserve_supported() == _ABI else None  # one of older sources is as good as none


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.pdserve_supported.restype = c_int
    library.pdserve_model_new.argtypes = (POINTER(Shape), c_void_p)
    library.pdserve_model_new.restype = c_void_p
    library.pdserve_model_free.argtypes = (c_void_p,)
    library.pdserve_model_free.restype = None
    library.pdserve_model_weight.argtypes = (c_void_p, c_int64, c_int, c_void_p, c_int64, c_int64, c_int)
    library.pdserve_model_weight.restype = c_int
    library.pdserve_model_norm.argtypes = (c_void_p, c_int64, c_int, c_void_p)
    library.pdserve_model_norm.restype = None
    library.pdserve_model_forward.argtypes = (c_void_p, POINTER(Step))
    library.pdserve_model_forward.restype = c_int
    library.pdserve_model_sample.argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p)
    library.pdserve_model_sample.restype = c_int
    return library
