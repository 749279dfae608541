"""The ground of gangs on GPUs: products of some columns with the bits of the whole product, and NCCL between two ranks.

Gangs compute on CPUs today. This part shows on one GPU whether the exactness of `pdserve.engine.layers.ranks` would hold there,
and asks NCCL to gather between two processes on it. NCCL is known to refuse two ranks on one GPU; then the row says what it
said, and nothing is shown of links between GPUs.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tools.gpu.row import Row, Setup

WIDTHS = {"qkv": (6144, 4096), "out": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
"""The products of a layer of Llama-3.1-8B, [out, in]."""
TINY = {"qkv": (96, 64), "down": (64, 192)}
ROWS = (1, 16, 256, 2048)
DEGREES = (2, 4, 8)
GATHERS = 50
MEETING_S = 15.0
"""NCCL takes seconds to set itself up."""


def run(setup: Setup) -> None:
    """Show both."""
    for dtype in (torch.bfloat16, torch.float32):
        for degree in DEGREES:
            columns(setup, dtype, degree)
    gathered(setup)


def columns(setup: Setup, dtype: torch.dtype, degree: int) -> None:
    """Show how many products of an equal part of the columns have the bits of the whole product."""
    widths, rows = (TINY, ROWS[:2]) if setup.rehearsed else (WIDTHS, ROWS)
    other = []
    for name, (width, depth) in widths.items():
        weight = torch.randn(width, depth, device=setup.device, dtype=dtype)
        for count in rows:
            x = torch.randn(count, depth, device=setup.device, dtype=dtype)
            parts = [F.linear(x, part) for part in weight.chunk(degree)]
            if not torch.equal(F.linear(x, weight), torch.cat(parts, 1)):
                other.append(f"{name} of {count}")
    every = len(widths) * len(rows)
    case = f"{str(dtype).removeprefix('torch.')} products, columns of {degree} ranks"
    note = f"other bits: {', '.join(other)}" if other else ""
    Row("ranks", case, f"{every - len(other)} of {every}", note=note[:160]).emit()


def gathered(setup: Setup) -> None:
    """Show how long two ranks on this GPU take to gather rows of 64 KiB, or why they cannot."""
    backend = "gloo" if setup.rehearsed else "nccl"
    context = multiprocessing.get_context("spawn")
    case = f"{backend}: two processes on one device gather 64 KiB"
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = context.Pipe()
        ranks = [
            context.Process(target=_meet, args=(rank, Path(folder) / "store", backend, setup.device.type, theirs))
            for rank in range(2)
        ]
        for rank in ranks:
            rank.start()
        said = ours.recv() if ours.poll(MEETING_S) else f"no answer within {MEETING_S:.0f} s"
        for rank in ranks:
            rank.join(5.0)
            rank.kill()
            rank.join()
    if isinstance(said, float):
        Row("ranks", case, f"{said * 1e6:.0f} us").emit()
    else:
        Row("ranks", case, "refused", note=said).emit()


def _meet(rank: int, store: Path, backend: str, device: str, told: Connection) -> None:
    """Gather as one of two ranks, and tell the median seconds of a gather, or the error in words."""
    try:
        dist.init_process_group(backend, f"file://{store}", timedelta(seconds=MEETING_S), world_size=2, rank=rank)
        own = torch.full((16, 512), rank + 1, dtype=torch.float32, device=device)
        whole = [torch.empty_like(own) for _ in range(2)]
        times = []
        for _ in range(GATHERS):
            began_s = time.perf_counter()
            dist.all_gather(whole, own)
            if device == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began_s)
        right = all(bool((one == number + 1).all()) for number, one in enumerate(whole))
        said: float | str = sorted(times)[GATHERS // 2] if right else "the rows are wrong"
    except (RuntimeError, ValueError) as exc:  # whatever NCCL says is what this part shows
        said = next((line for line in str(exc).splitlines() if "uplicate" in line), str(exc).split("\n", 1)[0])[:160]
    if rank == 0:
        with suppress(OSError):
            told.send(said)
