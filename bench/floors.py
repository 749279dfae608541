"""What this machine could do at best, measured in the same run: the floors beside which figures are printed."""

from __future__ import annotations

import statistics
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


def median_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median duration; the first call warms up and does not count."""
    work()
    times = []
    for _ in range(repeats):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def measure(threads: int) -> Machine:
    """Read bandwidth (a sum over 512 MiB), bf16 matrix product peak (1024^3), copy bandwidth (256 MiB), about 3 s."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        big = torch.ones(128 << 20, dtype=torch.float32)
        read_s = median_s(big.sum)
        half = big[: 64 << 20]
        target = torch.empty_like(half)
        copy_s = median_s(lambda: target.copy_(half))
        a = torch.randn(1024, 1024, dtype=torch.bfloat16)
        gemm_s = median_s(lambda: a @ a)
        return Machine(threads, big.nbytes / read_s, 2 * 1024**3 / gemm_s, half.nbytes / copy_s)
    finally:
        torch.set_num_threads(before)
