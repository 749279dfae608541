"""What a part of the check prints, and how it measures."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `beside`: what `ours` is compared with, in the same unit; `ratio`: of the two, as text."""

    part: str
    case: str
    ours: str
    beside: str = ""
    ratio: str = ""
    note: str = ""

    def emit(self) -> None:
        """For the parent process, which gathers the rows of all parts."""
        print(json.dumps(asdict(self)), flush=True)


@dataclass(frozen=True, slots=True)
class Setup:
    """rehearsed: on CPU with shapes so small that times mean nothing, to see that every part runs to its end."""

    rehearsed: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearsed else "cuda")


def mean_s(work: Callable[[], Any], device: torch.device, runs: int = 10) -> float:
    """Seconds a run takes: the median over ROUNDS of the mean of `runs`, on the device's own clock where it has one."""
    work()  # compiles, allocates
    return statistics.median(_round_s(work, device, runs) for _ in range(ROUNDS))


def _round_s(work: Callable[[], Any], device: torch.device, runs: int) -> float:
    if device.type != "cuda":
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(runs):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / runs


def wall_s(work: Callable[[], Any], runs: int = 10) -> float:
    """As `mean_s` for work that waits for its own result: what the caller sees, host included."""
    work()
    found = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for _ in range(runs):
            work()
        found.append((time.perf_counter() - began_s) / runs)
    return statistics.median(found)
