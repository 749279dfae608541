"""The best rates of this machine, measured in the same run. They give the floors that are printed beside the figures."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Final

import torch

from bench.engine.peers.cases import mean_s
from pdserve.config import MIB
from pdserve.engine.peaks import instruction_rate, onednn_rate

WIDTH: Final = 2048


@dataclass(frozen=True, slots=True)
class Machine:
    """The best rates of `threads` threads. A floor is the rate of the machine without other work.

    bf16_flops_s, int8_flops_s: products of such numbers by the fastest instruction there is. set_bf16_flops_s,
    set_int8_flops_s: those by the instruction of our compiled code, which another engine may not use; 0 without such code.
    """

    threads: int
    read_bytes_s: float
    bf16_flops_s: float
    copy_bytes_s: float
    int8_flops_s: float = 0.0
    set_bf16_flops_s: float = 0.0
    set_int8_flops_s: float = 0.0

    def flops_s(self, bits: int) -> float:
        """Return the operations a second of products of numbers of so many bits."""
        return self.int8_flops_s if bits == 8 else self.bf16_flops_s

    def set_flops_s(self, bits: int) -> float:
        """Return the same of the instruction of our compiled code."""
        return self.set_int8_flops_s if bits == 8 else self.set_bf16_flops_s


def median_of(found: Sequence[Machine]) -> Machine:
    """Return a machine with the median of each rate."""
    names = [field.name for field in fields(Machine) if field.name != "threads"]
    return replace(found[0], **{name: median(getattr(one, name) for one in found) for name in names})


def measure(threads: int, *, clock: Callable[[], float] = time.perf_counter) -> Machine:
    """Measure reads and copies of large tensors, products of 2048^3 and the product instruction. It takes about 5 s.

    clock: `time.thread_time` leaves out other work on the machine. It counts one thread only, so `threads` must be 1 then.

    The peak of products of several threads is the peak of one thread times their number. When other work runs on the
    machine, a parallel product waits for its slowest thread, and a floor must not contain this wait.
    """

    def time_of(call: Callable[[], object]) -> float:
        return min(mean_s(call, clock=clock) for _ in range(3))

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        bf16, int8 = (threads * instruction_rate(dtype, time_of) for dtype in (torch.bfloat16, torch.int8))
        best_bf16, best_int8 = (threads * onednn_rate(dtype, WIDTH, time_of) for dtype in (torch.bfloat16, torch.int8))
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
        return Machine(
            threads, data.nbytes / read_s, max(bf16, best_bf16), 32 * 4 * MIB / copy_s, max(int8, best_int8), bf16, int8
        )
    finally:
        torch.set_num_threads(before)


def cpu_name() -> str:
    """Return the name of the processor, as Linux reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
