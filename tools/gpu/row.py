"""The rows that a part of the check prints, and the ways in which it measures time."""

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
ROUND_S = 0.02  # length of a round of replays: long beside the launch of a graph, about 10 us
ROTATED_BYTES = 256 << 20  # four times the L2 cache of an H200 (60 MB)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `beside` is the figure that `ours` is compared with, in the same unit; `ratio` compares
    the two.
    """

    part: str
    case: str
    ours: str
    beside: str = ""
    ratio: str = ""
    note: str = ""

    def emit(self) -> None:
        """Print the row for the parent process, which gathers the rows of all parts."""
        print(json.dumps(asdict(self)), flush=True)


@dataclass(frozen=True, slots=True)
class Setup:
    """The conditions under which a part runs.

    rehearsed: it runs on CPU with shapes so small that times mean nothing, to see that every part runs to its end. limit_s: the
    part is ended after this time.
    """

    rehearsed: bool
    limit_s: float = 60.0

    @property
    def device(self) -> torch.device:
        """The device that is checked; in a rehearsal the CPU."""
        return torch.device("cpu" if self.rehearsed else "cuda")

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments for another process of the same part."""
        return ["--limit-s", str(self.limit_s), *(["--rehearse"] if self.rehearsed else [])]


def rotations(work_bytes: int) -> int:
    """Return the number of buffers between which work takes turns, so that it finds none of them in the L2 cache. The work
    reads `work_bytes`.
    """
    return max(1, ceil_div(ROTATED_BYTES, work_bytes))


def replayed_s(works: Sequence[Callable[[], Any]], device: torch.device) -> float:
    """Return the seconds that one of `works` takes on the device. All do the same work, each on its own buffers, see
    `rotations`.

    The works are recorded in one CUDA graph, one after the other, so that a launch costs no time of the host. The result is the
    median of ROUNDS rounds of replays. On CPU each work runs once, after a first run that is not counted.
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
    """Record all of `works` as the engine records its decode steps, and return the function that repeats them."""
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
    """Return the seconds of `work` as its caller sees them, host included. The work must wait for its own result."""
    work()
    found = []
    for _ in range(ROUNDS):
        began_s = time.perf_counter()
        for _ in range(runs):
            work()
        found.append((time.perf_counter() - began_s) / runs)
    return statistics.median(found)
