"""What this machine could do at best, measured in the same run: the floors beside which figures are printed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPEATS = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates of so many threads."""

    threads: int
    read_bytes_s: float
    bf16_flops_s: float
    copy_bytes_s: float


def best_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The shortest duration, since a floor is what the machine can do when nobody else is on it."""
    work()
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return min(times)


def measure(threads: int) -> Machine:
    """Read bandwidth (a sum over 512 MiB), bf16 matrix product peak (1024^3), copy bandwidth (256 MiB), about 3 s.

    The matrix peak of several threads is that of one times their number: with company on the machine a parallel
    product waits for its slowest thread, and a floor must not.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        a = torch.randn(1024, 1024, dtype=torch.bfloat16)
        gemm_s = best_s(lambda: a @ a)
        torch.set_num_threads(threads)
        big = torch.ones(128 << 20, dtype=torch.float32)
        read_s = best_s(big.sum)
        half = big[: 64 << 20]
        target = torch.empty_like(half)
        copy_s = best_s(lambda: target.copy_(half))
        return Machine(threads, big.nbytes / read_s, threads * 2 * 1024**3 / gemm_s, half.nbytes / copy_s)
    finally:
        torch.set_num_threads(before)
