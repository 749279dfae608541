"""Measure how KV blocks cross between two processes: sizes, counts, transports, CPU time, latency, and reads behind work.

    python -m bench.transfer.sweep [--rounds 9] [--quick] [--json FILE] [--plot FILE.png]

In every round all ways move the same scattered blocks, one after the other: a plain copy in one process (the floor), a raw
TCP socket, NIXL within one host with and without checksums at the reader, NIXL held to TCP, and CMA. Every read is compared
bit for bit. CPU seconds count all threads of the reading and of the lending process.

*Exposed* is the share of a read's time by which a computation of twice that length ends later when the read runs beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

from bench.ratios import Ratio, ratio
from bench.transfer.sweep_report import Cell, Sweep, tables
from bench.transfer.ways import WAYS, Bench, Way
from pdserve_bench.report.meta import commit, hardware

KIB: Final = 1024
BLOCK_BYTES: Final = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
COUNTS: Final = (1, 16, 256)
MOST_BYTES: Final = 64 * KIB * KIB
"""The most bytes of one read: a prompt of 3,000 tokens of SmolLM2-135M."""
SAMPLE_BYTES: Final = 16 * KIB * KIB
"""Smaller reads follow each other until this many bytes were moved, since a clock and a count of CPU time cost microseconds."""
MOST_REPEATS: Final = 64
HIDDEN: Final = (256 * KIB, 256)
"""The read that runs behind a computation: (block bytes, blocks)."""
PRODUCT: Final = 384
"""The matrices of the computation, squares of float32: they stay in the caches of one core."""


def grid(quick: bool) -> list[tuple[int, list[int]]]:
    """Return each size of a block with its counts."""
    sizes = (BLOCK_BYTES[0], HIDDEN[0]) if quick else BLOCK_BYTES
    return [(size, [count for count in COUNTS if size * count <= MOST_BYTES]) for size in sizes]


def measure_cell(bench: Bench, block_bytes: int, count: int, rounds: int) -> Cell:
    """Measure one size and count by all ways. The first round warms up; in each later round another way begins."""
    repeats = max(1, min(MOST_REPEATS, SAMPLE_BYTES // (block_bytes * count)))
    cell = Cell(block_bytes, count, {name: [] for name in WAYS})
    for turn in range(rounds + 1):
        first = turn % len(bench.ways)
        for way in (*bench.ways[first:], *bench.ways[:first]):
            sample = bench.sample(way, count, repeats, os.getpid())
            if turn:
                cell.samples[way.name].append(sample)
    return cell


def measure_latency(bench: Bench, rounds: int, reads: int = 100) -> dict[str, list[float]]:
    """Return the seconds of single reads of one block, by way. The ways take turns of `reads` reads."""
    times_s: dict[str, list[float]] = {name: [] for name in WAYS}
    for turn in range(rounds + 1):
        for way in bench.ways:
            took_s = [timed(lambda way=way: way.read(1)) for _ in range(reads)]  # type: ignore[misc]
            if turn:
                times_s[way.name] += took_s
    return times_s


def measure_hidden(bench: Bench, count: int, rounds: int) -> dict[str, Ratio]:
    """Return the exposed share of a read behind a computation, by way: (both together - computation alone) / read alone."""
    return {way.name: _exposed(way, count, rounds) for way in bench.ways}


def _exposed(way: Way, count: int, rounds: int) -> Ratio:
    read_s = min(timed(lambda: way.read(count)) for _ in range(3))
    product_s = min(timed(lambda: compute(8)) for _ in range(3)) / 8
    steps = max(1, round(2 * read_s / product_s))
    later_s, alone_s = [], []
    for _ in range(rounds):
        computed_s = timed(lambda: compute(steps))
        alone_s.append(timed(lambda: way.read(count)))
        later_s.append(_beside(steps, lambda: way.read(count)) - computed_s)
    return ratio(later_s, alone_s)


def _beside(steps: int, read: Callable[[], None]) -> float:
    """Return the seconds until a computation has ended that runs in a separate thread beside a read."""
    ended_s: list[float] = []

    def run() -> None:
        compute(steps)
        ended_s.append(time.perf_counter())

    thread = threading.Thread(target=run)
    began_s = time.perf_counter()
    thread.start()
    try:
        read()
    finally:
        thread.join()
    return ended_s[0] - began_s


_LEFT, _OUT = torch.full((PRODUCT, PRODUCT), 0.5), torch.empty(PRODUCT, PRODUCT)


def compute(steps: int) -> None:
    """Multiply matrices `steps` times in this thread, as a step of an engine does."""
    for _ in range(steps):
        torch.mm(_LEFT, _LEFT, out=_OUT)


def timed(function: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    began_s = time.perf_counter()
    function()
    return time.perf_counter() - began_s


def measure(rounds: int, quick: bool, console: Console) -> Sweep:
    """Measure everything. Each size of a block has passive processes of its own."""
    cells: list[Cell] = []
    latency_s: dict[str, list[float]] = {}
    exposed: dict[str, Ratio] = {}
    for block_bytes, counts in grid(quick):
        with ExitStack() as stack:
            bench = Bench(stack, max(counts), block_bytes)
            cells += [measure_cell(bench, block_bytes, count, rounds) for count in counts]
            if block_bytes == BLOCK_BYTES[0]:
                latency_s = measure_latency(bench, rounds)
            if block_bytes == HIDDEN[0]:
                exposed = measure_hidden(bench, HIDDEN[1], 3 * rounds)
        console.print(f"blocks of {block_bytes // KIB} KiB: done", style="dim")
    return Sweep(tuple(cells), latency_s, exposed)


def to_json(sweep: Sweep, rounds: int, started: datetime.datetime) -> str:
    """Return the result with all samples, and with what was measured where."""
    meta = {
        "command": "python -m bench.transfer.sweep",
        "rounds": rounds,
        "commit": commit(Path(__file__).resolve().parents[2]),
        "hardware": hardware(),
        "python": platform.python_version(),
        "started": started.isoformat(timespec="seconds"),
        "ended": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    return json.dumps({"meta": meta, **asdict(sweep)})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="only blocks of 4 and of 256 KiB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw rates and CPU time, also as FILE-dark; needs matplotlib"
    )
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")
    torch.set_num_threads(1)
    started = datetime.datetime.now(datetime.UTC)
    sweep = measure(options.rounds, options.quick, console := Console(width=150))
    for table in tables(sweep):
        console.print(table)
    if options.json is not None:
        options.json.write_text(to_json(sweep, options.rounds, started), encoding="utf-8")
    if options.plot is not None:
        from bench.transfer.sweep_plot import plot

        plot(options.plot, sweep)


if __name__ == "__main__":
    main()
