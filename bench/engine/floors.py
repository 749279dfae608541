"""The best rates of this machine, measured in the same run. They give the floors that are printed beside the figures."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from bench.engine.peers.cases import mean_s
from pdserve.config import MIB


@dataclass(frozen=True, slots=True)
class Machine:
    """The best rates of `threads` threads. A floor is the rate of the machine without other work."""

    threads: int
    read_bytes_s: float
    bf16_flops_s: float
    copy_bytes_s: float


def median_of(found: Sequence[Machine]) -> Machine:
    """Return a machine with the median of each rate."""
    middle = {name: median(getattr(one, name) for one in found) for name in ("read_bytes_s", "bf16_flops_s", "copy_bytes_s")}
    return replace(found[0], **middle)


def measure(threads: int, *, clock: Callable[[], float] = time.perf_counter) -> Machine:
    """Measure reads and copies of large tensors and a bfloat16 product of 2048^3. It takes about 3 s.

    clock: `time.thread_time` leaves out other work on the machine. It counts one thread only, so `threads` must be 1 then.

    The peak of products of several threads is the peak of one thread times their number. When other work runs on the
    machine, a parallel product waits for its slowest thread, and a floor must not contain this wait.
    """
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        ones = torch.ones(2048, 2048, dtype=torch.bfloat16)
        gemm_s = min(mean_s(lambda: ones @ ones, clock=clock) for _ in range(3))
        data, target = torch.ones(32 * MIB), torch.empty(32 * MIB)
        rows, vector = data.view(-1, 4096), torch.ones(4096)
        reads_s, copies_s = [], []
        for count in {1, threads}:
            torch.set_num_threads(count)
            reads_s += [
                mean_s(reader, clock=clock) for reader in (data.sum, lambda: rows @ vector, lambda: torch.dot(data, data))
            ]
            copies_s += [mean_s(lambda: target.copy_(data), clock=clock) for _ in range(3)]
        read_s, copy_s = min(reads_s), min(copies_s)
        return Machine(threads, data.nbytes / read_s, threads * 2 * 2048**3 / gemm_s, 32 * 4 * MIB / copy_s)
    finally:
        torch.set_num_threads(before)
