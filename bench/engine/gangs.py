"""Measures a gang beside one process: two ranks of one thread, a process with two threads, and one with a single thread.

    python -m bench.engine.gangs [--ranks 2] [--rounds 9] [--dtype float32]

The model has the shape of Qwen2.5-0.5B and made-up weights, and needs no download. The ways take turns within each round. First
come the time of a sum over ranks (meetings.cpp), each rank on a core of its own, and the time in which ranks by torch gather
rows: in shared memory, and over gloo.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table

import pdserve
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.families.llama import llama_spec
from pdserve.checkpoint.tiny import write_tiny
from pdserve.config import MIB, Dtype, EngineConfig
from pdserve.core.ids import BlockId, SeqId
from pdserve.core.model_spec import RopeSpec
from pdserve.core.sampling import SamplingParams
from pdserve.core.shards import Degrees, RankShare
from pdserve.core.step_plan import SampleSpec, SequenceSlice, StepPlan
from pdserve.engine.gang.collective import CollectiveRanks, Library
from pdserve.engine.gang.meeting import MetRanks, meeting_bytes
from pdserve.engine.gang.memory import SharedMemory
from pdserve.engine.runner import ModelRunner

SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 24, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
CONTEXT: Final = 128
CASES: Final = {
    "prefill 512": (1, 512, 0),
    "decode B=1": (1, 1, CONTEXT),
    "decode B=8": (8, 1, CONTEXT),
    "decode B=32": (32, 1, CONTEXT),
}
"""(sequences, new tokens of each, cached tokens of each), by the name of the step."""
AT_LEAST_S: Final = 0.2
GATHERED: Final = ((1, 576), (16, 1024), (256, 1024))
"""Rows and columns of float32: 2.3 KB is a row of SmolLM2-135M."""
GATHERS: Final = 2000
GATHER_TIMEOUT_S: Final = 60.0
SOURCES: Final = Path(pdserve.__file__).parent / "engine" / "native" / "src"


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="float32: torch computes")
    args = parser.parse_args()
    console = Console()
    table = Table("bytes of a sum", "median us", "p99 us", title=f"{args.ranks} ranks add up")
    for line in meetings(args.ranks):
        table.add_row(*line)
    console.print(table)
    table = Table("bytes of all columns", "by", "median us", "p99 us", title=f"{args.ranks} ranks gather rows")
    for library in (None, "gloo"):
        for line in gathers(args.ranks, library):
            table.add_row(*line)
    console.print(table)
    with tempfile.TemporaryDirectory() as folder:
        times = measured(Path(folder), args.ranks, args.rounds, args.dtype)
    table = Table("step", *(f"{name}, tokens/s" for name in times), "gang / one thread", "gang / threads")
    one, threads, gang = times.values()
    for case, (sequences, new, _) in CASES.items():
        rates = [sequences * new / statistics.median(way[case]) for way in times.values()]
        ratios = [statistics.median(a / b for a, b in zip(other[case], gang[case], strict=True)) for other in (one, threads)]
        table.add_row(case, *(f"{rate:.1f}" for rate in rates), *(f"{ratio:.2f}" for ratio in ratios))
    console.print(table)


def meetings(ranks: int) -> Iterator[list[str]]:
    """Yield the bytes of a sum, the median of its microseconds and their 99th percentile."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/meetings"
        flags = ["-std=c++20", "-O3", "-ffp-contract=off", "-march=native", "-pthread", f"-I{SOURCES}"]
        subprocess.run(["g++", *flags, str(Path(__file__).with_name("meetings.cpp")), "-o", program], check=True)
        result = subprocess.run([program, str(ranks), "20000"], check=True, capture_output=True, text=True)
    yield from (line.split() for line in result.stdout.splitlines())


def gathers(ranks: int, library: Library | None) -> Iterator[list[str]]:
    """Yield the bytes of gathered rows, how they are gathered, the median of the microseconds and their 99th percentile.

    Ranks are processes of one thread, on any cores. No library is shared memory.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        spec = llama_spec(
            vocab_size=512, hidden_size=64, intermediate_size=64, heads=8, kv_heads=[8], head_dim=8, max_position=64,
            rope=RopeSpec(1e4), eps=1e-5, tied_head=True,
        )  # fmt: skip
        share = RankShare(spec, Degrees(ranks))
        memory, (ours, theirs) = SharedMemory(meeting_bytes(share)), context.Pipe()
        children = [
            context.Process(target=_gather, args=(replace(share, number=number), memory, library, Path(folder), theirs))
            for number in range(ranks)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
        while ours.poll():
            nbytes, median_s, p99_s = ours.recv()
            yield [str(nbytes), library or "shared memory", f"{median_s * 1e6:.0f}", f"{p99_s * 1e6:.0f}"]


def _gather(share: RankShare, memory: SharedMemory, library: Library | None, folder: Path, told: Connection) -> None:
    """Gather rows as one rank. Rank 0 tells the bytes, the median of its seconds and their 99th percentile."""
    torch.set_num_threads(1)
    ranks = MetRanks(share, memory, GATHER_TIMEOUT_S)
    if library is not None:
        cpu = torch.device("cpu")
        ranks = CollectiveRanks(share, memory, GATHER_TIMEOUT_S, library=library, folder=folder, device=cpu)
    for rows, width in GATHERED:
        columns = [one.columns_of(width) for one in share.of_stage]
        own, times_s = torch.ones(rows, len(columns[share.rank])), []
        for _ in range(GATHERS):
            began_s = time.perf_counter()
            ranks.gather(own, columns)
            times_s.append(time.perf_counter() - began_s)
        if share.number == 0:
            rest = sorted(times_s[GATHERS // 10 :])
            told.send((rows * width * 4, statistics.median(rest), rest[len(rest) * 99 // 100]))


def measured(folder: Path, ranks: int, rounds: int, dtype: Dtype) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each step in each round, by the name of the way."""
    write_tiny(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SHAPE))
    card = ModelCard.load(folder, load_format="dummy")
    configs = {
        "one thread": EngineConfig(threads=1),
        f"{ranks} threads": EngineConfig(threads=ranks),
        f"{ranks} ranks": EngineConfig(threads=1, tensor_parallel_size=ranks),
    }
    times: dict[str, dict[str, list[float]]] = {name: {case: [] for case in CASES} for name in configs}
    with ExitStack() as stack:
        runners = {}
        for name, config in configs.items():
            made = EngineConfig(
                load_format="dummy",
                dtype=dtype,
                kv_cache_memory=256 * MIB,
                threads=config.threads,
                tensor_parallel_size=config.tensor_parallel_size,
            )
            runners[name] = stack.enter_context(closing(ModelRunner.load(folder, card, made)))
        for round_ in range(rounds + 1):
            for case, sizes in CASES.items():
                for name, runner in runners.items():
                    torch.set_num_threads(configs[name].threads)  # of steps by torch, which are those of the process
                    seconds = step_s(runner, *sizes)
                    if round_:  # the first one warms up
                        times[name][case].append(seconds)
    torch.set_num_threads(1)
    return times


def step_s(runner: ModelRunner, sequences: int, new: int, cached: int) -> float:
    """Return the mean time of a step."""
    blocks = -(-(cached + new) // 16)
    sample = (SampleSpec(SamplingParams(temperature=0.0), 0),)
    plan = StepPlan(tuple(
        SequenceSlice(
            SeqId(i), cached, tuple((7 * j + i) % 500 for j in range(new)),
            (tuple(BlockId(i * blocks + b) for b in range(blocks)),), sample,
        )
        for i in range(sequences)
    ))  # fmt: skip
    began_s, steps = time.perf_counter(), 0
    while time.perf_counter() - began_s < AT_LEAST_S or not steps:
        runner.execute(plan)
        steps += 1
    return (time.perf_counter() - began_s) / steps


if __name__ == "__main__":
    main()
