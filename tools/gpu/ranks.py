"""The ground of gangs on GPUs: products of some columns with the bits of the whole product, and two ranks on one GPU.

Gangs compute on CPUs today. This part shows on one GPU whether the exactness of `pdserve.engine.layers.ranks` would hold there:
two processes share a small model and gather by gloo, beside one process. Then they gather by NCCL, which is known to refuse two
ranks on one GPU. Then the row says what it said, and nothing is shown of links between GPUs. Each rank has its own KV pool.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.nn.functional as F

from pdserve.checkpoint.card import ModelCard
from pdserve.config import EngineConfig
from pdserve.core.errors import ConfigError, ReplicaLost
from pdserve.core.shards import Degrees, RankShare
from pdserve.engine.gang.collective import CollectiveRanks, Library
from pdserve.engine.gang.meeting import RankDecoder, lose, meeting_bytes
from pdserve.engine.gang.memory import SharedMemory
from pdserve.engine.kv.pool import KvPool
from pdserve.engine.models.choice import make_model, torch_model
from pdserve.engine.models.weights import ModelWeights
from tools.gpu.row import Row, Setup
from tools.gpu.shapes import BLOCK_SIZE, card, plan, random_weights

WIDTHS = {"qkv": (6144, 4096), "out": (4096, 4096), "gate and up": (28672, 4096), "down": (4096, 14336)}
"""The products of a layer of Llama-3.1-8B, [out, in]."""
TINY = {"qkv": (96, 64), "down": (64, 192)}
ROWS = (1, 16, 256, 2048)
DEGREES = (2, 4, 8)
GATHERS = 50
TWO = Degrees(2)
SEQUENCES, PROMPT, ROOM = 3, 20, 32
RANKS_S = 25.0
"""Two processes import torch, start CUDA and wait for each other. NCCL takes seconds to set itself up."""


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
    """Show what two ranks on this GPU do by gloo, and what they do by NCCL, or why they cannot."""
    context = multiprocessing.get_context("spawn")
    share = RankShare(model_of(setup).spec, TWO)
    with tempfile.TemporaryDirectory() as folder:
        meetings = {library: SharedMemory(meeting_bytes(share)) for library in libraries(setup)}
        for library in meetings:
            (Path(folder) / library).mkdir()
        ours, theirs = context.Pipe()
        opened = {library: f"/proc/{os.getpid()}/fd/{memory.descriptor}" for library, memory in meetings.items()}
        ranks = [context.Process(target=serve, args=(number, setup, Path(folder), opened, theirs)) for number in range(2)]
        for rank in ranks:
            rank.start()
        theirs.close()
        for row in rows_of(ours, RANKS_S * (4 if setup.rehearsed else 1)):
            row.emit()
        for rank in ranks:
            rank.kill()
            rank.join()


def rows_of(told: Connection, limit_s: float) -> Iterator[Row]:
    """Yield what two ranks tell until None, and a row more when they end or say nothing before it."""
    ends_s, shown = time.monotonic() + limit_s, set[Row]()
    reason = f"not over within {limit_s:.0f} s"
    try:
        while told.poll(max(0.0, ends_s - time.monotonic())):
            row = told.recv()
            if row is None:
                return
            if row not in shown:  # both ranks say why they refuse
                yield row
            shown.add(row)
    except EOFError:
        reason = "both processes have ended"
    yield Row("ranks", "two ranks on one device", "no answer", note=reason)


def libraries(setup: Setup) -> tuple[Library, ...]:
    """Return the libraries by which ranks gather. The last one may never answer."""
    return ("gloo",) if setup.rehearsed else ("gloo", "nccl")


def model_of(setup: Setup) -> ModelCard:
    """Return the model that two ranks share."""
    return card("rehearsal" if setup.rehearsed else "small")


def serve(number: int, setup: Setup, folder: Path, meetings: dict[Library, str], told: Connection) -> None:
    """Be one of two ranks, by one library after the other. Tell the rows of the table, and None at the end."""
    torch.set_num_threads(1)
    share = RankShare(model_of(setup).spec, TWO, number)
    for library, opened in meetings.items():
        memory = SharedMemory(meeting_bytes(share), os.open(opened, os.O_RDWR))
        case = f"{library}, two ranks"
        try:
            ranks = CollectiveRanks(share, memory, RANKS_S, library=library, folder=folder / library, device=setup.device)
            time_s = gather_s(ranks, setup)
            if number == 0:
                told.send(Row("ranks", f"{case}: gather of 64 KiB", f"{time_s * 1e6:.0f} us"))
            equal, every = steps_of_two(ranks, setup)
            told.send(Row("ranks", f"{case}: logits as by one", f"{equal} of {every} steps"))
        except ReplicaLost:
            pass  # of the other rank, which says why, or which has all its steps
        except (ConfigError, RuntimeError) as exc:  # whatever they say is what this part shows
            told.send(Row("ranks", case, "refused", note=str(exc).split("\n", 1)[0][:160]))
        finally:
            lose(memory)  # the other rank shall not wait
    if number == 0:
        told.send(None)


def gather_s(ranks: CollectiveRanks, setup: Setup) -> float:
    """Return the median seconds in which the ranks gather 16 rows of 1,024 numbers. Raises `RuntimeError` for a wrong one."""
    columns = [range(512), range(512, 1024)]
    expected = torch.arange(16 * 1024, dtype=torch.float32, device=setup.device).view(16, 1024)
    own = expected[:, 512:] if ranks.share.rank else expected[:, :512]
    times = []
    for _ in range(GATHERS):
        began_s = time.perf_counter()
        whole = ranks.gather(own, columns)
        ranks.end_step()
        times.append(time.perf_counter() - began_s)
        if not torch.equal(whole, expected):
            raise RuntimeError("the gathered rows are wrong")
    return statistics.median(times)


@torch.inference_mode()
def steps_of_two(ranks: CollectiveRanks, setup: Setup) -> tuple[int, int]:
    """Compute steps by both ranks. Return in rank 0 how many have the logits of one rank, bit for bit, and how many there are.

    Raises `ReplicaLost` in rank 1, when rank 0 has ended.
    """
    shape, dtype = model_of(setup), torch.float32 if setup.rehearsed else torch.bfloat16
    layout = shape.kv_layout(BLOCK_SIZE, "float32" if setup.rehearsed else "bfloat16", "auto")
    kv_bytes = SEQUENCES * ROOM // BLOCK_SIZE * layout.block_bytes
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=SEQUENCES, kv_cache_memory=kv_bytes)

    def parts() -> tuple[ModelWeights, KvPool, EngineConfig, int]:
        torch.manual_seed(3)
        kv = KvPool(layout, kv_bytes, setup.device, dtype)
        return random_weights(shape, dtype, setup.device), kv, config, ROOM

    rank = RankDecoder(torch_model(*parts(), ranks), ranks)
    if ranks.share.number:
        rank.follow()
    alone = make_model(shape.spec, *parts())
    equal = 0
    steps = [(0, PROMPT), *((start, 1) for start in range(PROMPT, ROOM))]
    for start, count in steps:
        step = plan(shape, range(SEQUENCES), start=start, count=count, room=ROOM)
        rows = list(range(step.num_tokens))
        expected, found = alone.forward(step, rows), rank.forward(step, rows)
        assert expected is not None
        assert found is not None
        equal += torch.equal(expected.values, found.values)
    return equal, len(steps)
