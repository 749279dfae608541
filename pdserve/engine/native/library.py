"""The library of compiled kernels: it is found beside this file, declared for ctypes, and tried once.

One is built for each instruction set when pdserve is installed, if there is a compiler (`pyproject.toml`). Its plain C
interface takes addresses, so it needs none of torch's headers and works with any torch. It has its own threads: torch's OpenMP
threads spin after each parallel region, which on two cores takes a core away from the next region.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int64, c_void_p
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from pdserve.core.errors import ConfigError

ABI: Final = 17  # PDSERVE_ABI of abi.h


class InstructionSet(NamedTuple):
    """The names of an instruction set for people, and of the instructions that multiply numbers of 16 and of 8 bits."""

    title: str
    bf16: str
    int8: str

    def products(self, bits: int) -> str:
        """Return the instruction that multiplies numbers of so many bits."""
        return self.int8 if bits == 8 else self.bf16


EMULATED: Final = "amx_emulated"
"""The library of amx with emulated tiles. It gives the bits of amx on CPUs that have only avx512_bf16, and it is slow."""
KNOWN: Final = {
    "amx": InstructionSet("AMX", "tdpbf16ps", "tdpbsud"),
    "avx512_bf16": InstructionSet("AVX-512 with bf16", "vdpbf16ps", "vpdpbusd"),
    "avx512": InstructionSet("AVX-512", "two vfmadd231ps", "vpdpbusd"),
    "avx2": InstructionSet("AVX2", "two vfmadd231ps", "vpdpbusd or vpmaddubsw"),
    EMULATED: InstructionSet("emulated AMX", "tdpbf16ps, emulated", "tdpbsud, emulated"),
}
"""What is known of each instruction set, the fastest first."""
SETS: Final = tuple(isa for isa in KNOWN if isa != EMULATED)
"""The instruction sets that have a library, the fastest first. All but amx compute the same bits: see src/tile_products.h."""
ISA: Final = "PDSERVE_ISA"
"""The environment variable that forces a set, so that a slower one can be tried where a faster one runs."""
NO_SET: Final = "none"
"""The value of `PDSERVE_ISA` with which torch computes."""
CHOICES: Final = (*SETS, EMULATED, NO_SET)
"""The values of `PDSERVE_ISA`."""
PERMISSION: Final = "the kernel gives no permission to use tiles"
"""What a library of amx misses on a CPU that has AMX."""
DONE: Final = 1
NO_MEMORY: Final = 0
UNSOUND: Final = -1
NO_THREAD: Final = -2
LOST: Final = -4


class Moe(Structure):
    """`PdMoe` of abi.h."""

    _fields_ = [
        *((name, c_int64) for name in ("experts", "experts_per_token", "intermediate", "sigmoid", "renormalise", "groups")),
        *((name, c_int64) for name in ("top_groups", "best_two", "shared", "shared_gate")),
        *((name, c_int64) for name in ("first_expert", "own_experts")),
        ("scale", c_double),
    ]  # fmt: skip


class Latent(Structure):
    """`PdLatent` of abi.h."""

    _fields_ = [(name, c_int64) for name in ("kv_rank", "q_rank", "nope_dim", "v_dim")]


class NativeLayer(Structure):
    """`PdLayer` of abi.h."""

    _fields_ = [
        *((name, c_int64) for name in ("heads", "kv_heads", "head_dim", "intermediate", "group", "index")),
        *((name, c_int64) for name in ("rope_dim", "activation", "first_kv_head", "all_kv_heads", "stores_kv", "shares_kv")),
        *((name, c_double) for name in ("rms_norm_eps", "head_norm_eps", "scale", "softcap")),
        ("rope", c_void_p), ("latent", Latent), ("moe", Moe),
    ]  # fmt: skip


class NativeGang(Structure):
    """`PdGang` of abi.h."""

    _fields_ = [
        *((name, c_int64) for name in ("rank", "ranks", "stage", "stages", "rows", "sum_rows", "hidden", "vocab")),
        *((name, c_int64) for name in ("gathered", "step_bytes", "timeout_ms")),
        ("memory", c_void_p),
    ]  # fmt: skip


class NativeShape(Structure):
    """`PdShape` of abi.h."""

    _fields_ = [
        *((name, c_int64) for name in ("hidden", "vocab", "layers", "groups")),
        ("layer", POINTER(NativeLayer)), ("windows", c_void_p), ("group_layers", c_void_p),
        *((name, c_int64) for name in ("first_token_id", "own_vocab")),
        ("gang", POINTER(NativeGang)),
        *((name, c_double) for name in ("rms_norm_eps", "embedding_scale", "softcap")),
        *((name, c_int64) for name in ("parts", "first_column", "own_columns")),
    ]  # fmt: skip


class NativeGroup(Structure):
    """`PdGroup` of abi.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("span_table", "tables", "pool")),
        *((name, c_int64) for name in ("blocks", "kv_format")),
    ]  # fmt: skip


class Step(Structure):
    """`PdStep` of abi.h."""

    _fields_ = [
        *((name, c_int64) for name in ("threads", "layers", "rows", "spans", "out_rows")),
        *((name, c_void_p) for name in ("token_ids", "span_start", "span_count", "drafted", "out", "groups")),
        ("block_size", c_int64),
        *((name, c_void_p) for name in ("logits", "best")),
    ]  # fmt: skip


# `PdRow` of abi.h in two parts; the second may stay zero. A packed row takes a quarter of the time of a ctypes structure.
ROW_DRAW: Final = Struct("@qqdddQQ")  # row, top_k, temperature, top_p, min_p, seed, index
ROW_MORE: Final = Struct("@PPqPPqdddPqPPqP")  # bias, seen, penalties, banned, logprobs, mask
ROW_BYTES: Final = ROW_DRAW.size + ROW_MORE.size


def installed(name: str) -> Path | None:
    """Return the path of a library that was built with this package; None when it was not built."""
    here = Path(__file__).parent
    return next((path for suffix in EXTENSION_SUFFIXES if (path := here / f"{name}{suffix}").is_file()), None)


@dataclass(frozen=True, slots=True)
class Found:
    """A search's result.

    library: the library, or None when none runs here. why: in words, what the library is, or why there is none.
    isa: the name of its instruction set.
    """

    library: ctypes.CDLL | None
    why: str
    isa: str = NO_SET


@cache
def find() -> Found:
    """Find and open the library of the fastest set that this CPU runs, or that of the set that `PDSERVE_ISA` names.

    Raises `ConfigError` when `PDSERVE_ISA` names no set, or one that does not run here.
    """
    forced = os.environ.get(ISA, "")
    if forced == NO_SET:
        return Found(None, f"{ISA} is {NO_SET}")
    if forced and forced not in CHOICES:
        raise ConfigError(f"{ISA} must be one of {', '.join(CHOICES)}, got {forced!r}")
    found = Found(None, "no compiled kernels: there was no C++ compiler for x86-64 when pdserve was installed")
    refused = ""
    for isa in (forced,) if forced else order(_vendor()):
        path = installed(f"_kernels_{'amx' if isa == EMULATED else isa}")
        if path is None:
            if forced and any(map(installed, map("_kernels_{}".format, SETS))):
                found = Found(None, "it was not built when pdserve was installed, which its compiler may not support")
            continue
        found = open_library(path, emulated=isa == EMULATED)
        if found.library is not None:
            return replace(found, why=found.why + refused)
        if PERMISSION in found.why:
            refused = f"; without AMX: {found.why}"
    if forced:
        raise ConfigError(f"{ISA} is {forced}, and {found.why}")
    return found


def order(vendor: str) -> tuple[str, ...]:
    """Return the sets in the order in which they are tried, which is that of their speed on a vendor's CPUs.

    On an Intel Xeon with AVX-512, one thread computes 108 GFLOP/s by the dot product of bfloat16 and 222 by multiply-adds of
    float32, which give the same bits. On CPUs of AMD the dot product is twice as fast as multiply-adds.
    """
    return ("amx", "avx512", "avx512_bf16", "avx2") if vendor == "GenuineIntel" else SETS


def _vendor() -> str:
    """Return the name of the vendor of this machine's CPUs; "" when the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":")[1].strip() for line in lines if line.startswith("vendor_id")), "")


def open_library(path: Path, *, emulated: bool = False) -> Found:
    """Open the library in a given file. Only its checks of version and CPU run before it is known to work here.

    emulated: tiles are emulated; the library is one of amx.
    """
    try:
        library = declared(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as exc:
        return Found(None, f"the compiled kernels do not load, install pdserve again: {exc}")
    if library.pdserve_abi() != ABI:
        return Found(None, "the compiled kernels are of another version of pdserve: install it again")
    if emulated:
        library.pdserve_emulate()
    isa = library.pdserve_isa().decode()
    if isa == EMULATED and not emulated:  # a library has one state in a process
        return Found(None, "its tiles are emulated in this process")
    missing = library.pdserve_missing().decode()
    if missing:
        return Found(None, missing if missing == PERMISSION else f"this CPU lacks {missing}")
    return Found(library, f"{KNOWN[isa].title}, {library.pdserve_compiler().decode().split('(')[0].strip()}", isa)


def load() -> ctypes.CDLL | None:
    """Return the library. None: no library runs here, and `find` says why."""
    return find().library


def declared(library: ctypes.CDLL) -> ctypes.CDLL:
    """Return a library whose functions know their types."""
    library.pdserve_abi.restype = library.pdserve_emulate.restype = c_int
    library.pdserve_missing.restype = library.pdserve_isa.restype = library.pdserve_compiler.restype = c_char_p
    library.pdserve_model_new.argtypes = (POINTER(NativeShape), c_void_p)
    library.pdserve_model_new.restype = c_void_p
    library.pdserve_model_free.argtypes = (c_void_p,)
    library.pdserve_model_free.restype = None
    library.pdserve_model_weight.argtypes = (c_void_p, c_int64, c_int, c_int64, c_void_p, *[c_int64] * 4, c_int)
    library.pdserve_model_weight.restype = c_int
    library.pdserve_model_vector.argtypes = (c_void_p, c_int64, c_int, c_void_p, c_int64)
    library.pdserve_model_vector.restype = c_int
    library.pdserve_model_expert_counts.argtypes = (c_void_p, c_int64, c_void_p)
    library.pdserve_model_expert_counts.restype = None
    library.pdserve_model_forward.argtypes = (c_void_p, POINTER(Step))
    library.pdserve_model_forward.restype = c_int
    library.pdserve_model_sample.argtypes = (c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p)
    library.pdserve_model_sample.restype = c_int
    library.pdserve_model_settle.argtypes = (c_void_p, c_void_p)
    library.pdserve_model_settle.restype = c_int
    library.pdserve_model_follow.argtypes = (c_void_p, c_int64, POINTER(NativeGroup))
    library.pdserve_model_follow.restype = c_int
    library.pdserve_gang_bytes.argtypes = library.pdserve_gang_logits.argtypes = (POINTER(NativeGang),)
    library.pdserve_gang_lose.argtypes = (POINTER(NativeGang),)
    library.pdserve_gang_bytes.restype = c_int64
    library.pdserve_gang_logits.restype = c_void_p
    library.pdserve_gang_lose.restype = None
    library.pdserve_products.argtypes = (c_int, c_int64)
    library.pdserve_products.restype = c_int64
    return library
