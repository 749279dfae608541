"""The peaks of a worker's device: operations and bytes a second. The utilisation of its engine is a share of them.

The peaks of a GPU come from its data sheet, by its name. A CPU has no such sheet for the cores that a worker gets, so products
and reads are measured once, in about 0.1 s. Both are the best of several tries, since other work on the machine slows some.
The peak of products is what the machine can do for the numbers that the engine multiplies: the rate of the instruction that the
compiled code uses, or that of oneDNN, which may use a faster one.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch

from pdserve.capacity.devices import device_by_driver_name
from pdserve.config import MIB, EngineConfig
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.layers.linear import Linear, scheme_for
from pdserve.engine.memory import host
from pdserve.engine.native import library

WIDTH: Final = 256
"""The rows, inputs and outputs of the product. It takes 0.2 ms, so that some tries pass while no other process has the core. A
product of 512 is 7 % faster, and was measured at a thirtieth of its speed while workers started side by side."""
ROUNDS: Final = 10_000
"""Rounds of products in registers: 0.05 to 0.2 ms, for the same reason."""
PRODUCT_BITS: Final = {torch.bfloat16: 16, torch.int8: 8}
"""The numbers that compiled code multiplies."""
MIN_TRIES: Final = 8
MAX_S: Final = 0.1
"""After this time fewer tries are enough."""
PRODUCTS_S: Final = 0.02
READS_S: Final = 0.02
LAST_LEVEL_BYTES: Final = 32 * MIB
"""The size of the last cache where the system does not report it."""
PART_BYTES: Final = 8 * MIB
"""The bytes of one read, 1 ms on one core."""
FREE_SHARE: Final = 0.25
"""A buffer for reads takes at most this share of the free memory."""
_CACHE: Final = Path("sys/devices/system/cpu/cpu0/cache")
_UNITS: Final = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Peaks(NamedTuple):
    """The most that a device can do in a second. 0: unknown."""

    flops_per_s: float = 0.0
    bytes_per_s: float = 0.0


def peaks_of(kv: KvPool, config: EngineConfig, *, products: torch.dtype | None = None, seen_flops_per_s: float = 0.0) -> Peaks:
    """Return the peaks of the device of a pool. A setting wins over what is known or measured.

    products: the dtype of the numbers that are multiplied with each other; the engine's dtype if it is None.
    seen_flops_per_s: operations a second that a step of the model has reached. The peak of a CPU is not below it.
    """
    if kv.device.type == "cuda":
        device = device_by_driver_name(torch.cuda.get_device_name(kv.device))
        known = Peaks()
        if device is not None:
            known = Peaks(device.peak(str(kv.dtype).removeprefix("torch.")), device.bytes_per_s)
    elif config.peak_flops_per_s is not None and config.peak_bytes_per_s is not None:
        known = Peaks()
    else:
        with _threads(torch.get_num_threads() * config.ranks):  # the other ranks of a gang are idle now, and so are their cores
            known = Peaks(max(_products(products or kv.dtype), seen_flops_per_s), _reads(kv))
    return Peaks(config.peak_flops_per_s or known.flops_per_s, config.peak_bytes_per_s or known.bytes_per_s)


def _products(dtype: torch.dtype) -> float:
    """Return the most operations a second of products in `dtype`: the rate of one thread, times the worker's threads.

    If all threads were timed together, they would wait for the thread that other work on the machine slows down.
    """
    threads = torch.get_num_threads()
    with _threads(1):
        best = max(instruction_rate(dtype, _products_s), onednn_rate(dtype, WIDTH, _products_s))
    return threads * best


TimeOf = Callable[[Callable[[], object]], float]
"""Function that calls a function and returns the seconds of a call."""


def _products_s(call: Callable[[], object]) -> float:
    return _best_s([call], PRODUCTS_S)


def instruction_rate(dtype: torch.dtype, time_of: TimeOf) -> float:
    """Return the operations a second at which one thread multiplies numbers of `dtype` by the instruction of the compiled code.

    They are in registers, so this is the most that the set in use can do. 0: no compiled code multiplies such numbers here.
    """
    compiled = library.load()
    if compiled is None or dtype not in PRODUCT_BITS:
        return 0.0
    multiply = partial(compiled.pdserve_products, PRODUCT_BITS[dtype], ROUNDS)
    operations: int = multiply()
    return operations / time_of(multiply)


def onednn_rate(dtype: torch.dtype, width: int, time_of: TimeOf) -> float:
    """Return the operations a second of a product of two matrices [width, width] by torch, whose oneDNN uses the fastest
    instructions that the CPU has. 0: this torch multiplies no such numbers."""
    ones = torch.ones(width, width, dtype=dtype)
    if dtype is not torch.int8:
        return 2 * width**3 / time_of(partial(Linear(scheme_for(ones.device, dtype), ones), ones))
    try:
        return 2 * width**3 / time_of(partial(torch._int_mm, ones, ones))
    except (AttributeError, NotImplementedError, RuntimeError):  # it is private to torch, as those of `Linear` are
        return 0.0


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Let torch compute with so many threads. It has as many as before at the end."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _reads(kv: KvPool) -> float:
    """Return the bytes a second that the worker's threads read from memory. 0: no buffer is larger than the last cache.

    Parts of the buffer are read in turn. It is twice as large as the cache, so no part is there when its turn comes again.
    """
    least = -(-2 * last_level_bytes() // PART_BYTES) * PART_BYTES
    buffer = kv.caches[0].blocks.view(-1)
    if buffer.nbytes < least:
        if least > FREE_SHARE * host.available_bytes():
            return 0.0
        buffer = torch.ones(least, dtype=torch.uint8)
    parts = torch.split(buffer[:least].view(torch.int32), PART_BYTES // 4)  # torch is slow with smaller numbers
    reads = [part.max for part in parts]
    threads = torch.get_num_threads()
    best_s = _best_s(reads, READS_S)
    if threads > 1:  # one thread alone is faster where other work keeps the other threads from starting
        with _threads(1):
            best_s = min(best_s, _best_s(reads, READS_S))
    return PART_BYTES / best_s


def last_level_bytes(root: Path = Path("/")) -> int:
    """Return the size of the CPU's last cache, as Linux reports it, or `LAST_LEVEL_BYTES`."""
    sizes = []
    for file in (root / _CACHE).glob("index*/size"):
        try:
            text = file.read_text().strip()
            sizes.append(int(text[:-1]) * _UNITS[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes, default=LAST_LEVEL_BYTES)


def _best_s(calls: Sequence[Callable[[], object]], budget_s: float) -> float:
    """Return the shortest time of a call. After one call of each to warm up, all are called in turn for about `budget_s`, and
    at least `MIN_TRIES` times."""
    calls[0]()
    best_s, start_s = float("inf"), time.perf_counter()
    for tries, call in enumerate(itertools.cycle(calls), start=1):
        began_s = time.perf_counter()
        call()
        now_s = time.perf_counter()
        best_s = min(best_s, max(now_s - began_s, 1e-9))
        if (now_s - start_s >= budget_s and tries >= MIN_TRIES) or now_s - start_s >= MAX_S:
            break
    return best_s
