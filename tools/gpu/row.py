"""What a part of the check prints, and how it measures."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pdserve.core.kv_layout import ceil_div

ROUNDS = 5
ROUND_S = 0.02  # of replays: long beside the launch of a graph, about 10 us
ROTATED_BYTES = 256 << 20  # four times the L2 cache of an H200 (60 MB)


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
    """rehearsed: on CPU with shapes so small that times mean nothing, to see that every part runs to its end.

    limit_s: after which the part is ended.
    """

    rehearsed: bool
    limit_s: float = 60.0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.rehearsed else "cuda")

    @property
    def arguments(self) -> list[str]:
        """Of the command line, for another process of the same part."""
        return ["--limit-s", str(self.limit_s), *(["--rehearse"] if self.rehearsed else [])]


def rotations(work_bytes: int) -> int:
    """How many buffers work that reads `work_bytes` takes turns with, so that it finds none of them in the L2 cache."""
    return max(1, ceil_div(ROTATED_BYTES, work_bytes))


def replayed_s(works: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Seconds that one of `works` takes on the device: the same work on buffers of its own each, see `rotations`.

    They are recorded in one CUDA graph, one after the other, so that a launch costs no time of the host's. The median of
    ROUNDS rounds of replays. On CPU each runs once, after a first time.
    """
    if device.type != "cuda":
        for work in works:
            work()
        began_s = time.perf_counter()
        for work in works:
            work()
        return (time.perf_counter() - began_s) / len(works)
    replay = recorded(works)
    replays = max(2, round(ROUND_S / _round_s(replay, 1)))
    return statistics.median(_round_s(replay, replays) for _ in range(ROUNDS)) / len(works)


def recorded(works: Sequence[Callable[[], Any]]) -> Callable[[], None]:
    """What repeats all of `works`, as the engine records its decode steps."""
    from pdserve.engine.models.graphs import cuda_recorder

    replay, _ = cuda_recorder()(lambda: [work() for work in works][-1])
    return replay


def _round_s(replay: Callable[[], None], replays: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(replays):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / replays


def wall_s(work: Callable[[], Any], runs: int = 10) -> float:
    """For work that waits for its own result, seconds as its caller sees them, host included."""
    work()
    found = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for _ in range(runs):
            work()
        found.append((time.perf_counter() - began_s) / runs)
    return statistics.median(found)
