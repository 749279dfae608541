"""Measures one engine's speed against the limits of the machine and, with --peers, against other engines on the same weights.

    python -m bench.engine.rates [--threads 2] [--model default] [--rounds 5] [--peers [NAME ...]] [--plot FILE.png]
    python -m bench.engine.rates --shape qwen2.5-0.5b --peers vllm openvino

The cases are prefill of 512 and 2,048 tokens, and decode steps of 1 to 64 sequences at 128 tokens of context and of 32 at
2,048. In each round all engines are measured in turn, case by case, so that other work on the machine slows all of them. The
table shows medians over the rounds; each figure is also printed as it comes. The floor of a step is the longer of two times:
reading its weights and KV at the measured memory bandwidth, and computing its products at the measured peak of the numbers that
it multiplies, bfloat16 or 8 bits. All rates are measured in each round, and a share of the floor uses the rates of its own
round. The peak is the best of oneDNN and of the instruction of our compiled code. A second table has both, with what our engine
reached, so that a machine with a faster instruction than the set in use shows.

--shape measures a model of random weights instead: `SHAPES` of shapes.py. The floor of a mixture of experts counts the experts
that the tokens of a step choose when all are chosen alike. llama.cpp's files are made for Llama only.

--peers installs vLLM's CPU build, llama.cpp (compiled), transformers and OpenVINO GenAI, each into its own environment in the
cache folder, and runs them as processes with the same number of threads. When one cannot be installed or fails, its row says
so. OpenVINO reads fp32 weights and computes in bfloat16, or reads int8 weights. It stores KV in 8 bits, its default.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console
from rich.table import Table

from bench.engine.floors import Machine, cpu_name, measure, median_of
from bench.engine.ours import load
from bench.engine.peers.cases import CASES, Case
from bench.engine.peers.peer import ENGINES, NotInstalled, PeerFailed, chosen, started
from bench.engine.roofline import BF16, INT4, INT8, Q4_1, Q8_0, Numbers, Point, plot, work_of
from bench.engine.shapes import SHAPES, shape_directory
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.engine.native import library

OURS = {None: ("pdserve bf16", BF16), "int8": ("pdserve int8", INT8), "int4": ("pdserve int4", INT4)}
ROUNDING = {None: BF16, "BF16": BF16, "Q8_0": Q8_0, "Q4_1": Q4_1, "openvino fp32": BF16, "openvino int8": INT8}


PREFILL_GOAL, DECODE_GOAL = 1.2, 1.5  # our best engine against their best; bfloat16 against bfloat16: at least 1.0


class Engine(Protocol):
    """An engine whose steps can be timed."""

    def seconds(self, case: Case) -> float:
        """Return the mean seconds of the case's step."""


@dataclass
class Row:
    """One engine and its times in seconds. `failed`: the reason why it is not measured any more; empty if it is."""

    name: str
    numbers: Numbers
    engine: Engine | None
    ours: bool
    failed: str = ""
    times: dict[Case, list[float]] = field(default_factory=lambda: {case: [] for case in CASES})

    def measure(self, case: Case) -> None:
        """Measure the case once more. An engine that fails is not asked again."""
        if self.engine is None:
            return
        try:
            self.times[case].append(self.engine.seconds(case))
        except PeerFailed as exc:
            self.engine, self.failed = None, f"{case.name}: {exc}"

    def median_s(self, case: Case) -> float | None:
        """Return the median seconds of the case's step; None when it was not measured."""
        return statistics.median(self.times[case]) if self.times[case] else None


def rows_of(
    directory: Path, card: ModelCard, threads: int, peers: Sequence[str], stack: ExitStack, console: Console
) -> list[Row]:
    """Load our engines and start the peers. `stack` ends the peers."""
    engines = load(directory, card, threads)
    rows = [Row(*OURS[quantization], engine, True) for quantization, engine in engines.items()]
    for one in chosen(peers):
        row = Row(one.name, ROUNDING[one.weights], None, False)
        try:
            row.engine = stack.enter_context(started(one, directory, card, threads, console.print))
        except (PeerFailed, NotInstalled) as exc:
            row.failed = str(exc)
        rows.append(row)
    return rows


def table_of(
    rows: Sequence[Row], card: ModelCard, machines: Sequence[Machine], title: str, cases: Sequence[Case] = CASES
) -> Table:
    """Return the table of tokens per second, shares of the floor, and ratios to the peers."""
    table = Table("engine", *(case.name for case in cases), title=title)
    for row in rows:
        cells = [_cell(row, case, card, machines) for case in cases]
        table.add_row(row.name + (f"\n{row.failed}" if row.failed else ""), *cells)
    if any(not row.ours for row in rows):
        table.add_section()
        table.add_row("best of ours / of theirs", *(_ratio(rows, case, bf16=False) for case in cases))
        table.add_row("  goal", *(f"{DECODE_GOAL if case.cached else PREFILL_GOAL} x" for case in cases))
        table.add_row("bf16 / their best bf16", *(_ratio(rows, case, bf16=True) for case in cases))
        table.add_row("  goal", *("1.0 x" for _ in cases))
    spread = max((max(found) / min(found) for row in rows for found in row.times.values() if found), default=1.0)
    table.caption = f"the slowest round of a cell took up to {spread:.1f} x its fastest"
    return table


def _cell(row: Row, case: Case, card: ModelCard, machines: Sequence[Machine]) -> str:
    seconds = row.median_s(case)
    if seconds is None:
        return "-"
    work, bits = work_of(case, card, row.numbers), row.numbers.bits
    share = statistics.median(work.floor_s(m, bits) / taken for m, taken in zip(machines, row.times[case], strict=False))
    return f"{case.step_tokens / seconds:,.0f} ({share:.0%})"


def _ratio(rows: Sequence[Row], case: Case, *, bf16: bool) -> str:
    best: dict[bool, float] = {}
    for row in rows:
        seconds = row.median_s(case)
        if seconds is not None and (row.numbers is BF16 or not bf16):
            best[row.ours] = min(seconds, best.get(row.ours, seconds))
    return f"{best[False] / best[True]:.2f} x" if len(best) == 2 else "-"


def products_of(rows: Sequence[Row], card: ModelCard, machine: Machine, isa: str) -> Table:
    """Return the table of operations a second: of the instruction of our engine, of the machine, and of our fastest step.

    isa: the instruction set of compiled steps, or the name for none.
    """
    table = Table("weights", f"instruction of {isa}", "its rate", "the machine's", "reached", title=f"GFLOP/s on {cpu_name()}")
    for row in rows:
        rates = [work_of(case, card, row.numbers).flops / s for case in CASES if (s := row.median_s(case)) is not None]
        if not row.ours or not rates:
            continue
        bits, reached = row.numbers.bits, max(rates)
        name = library.KNOWN[isa].products(bits) if isa in library.KNOWN else "-"
        limits = machine.set_flops_s(bits), machine.flops_s(bits)
        table.add_row(
            row.name, name, *(f"{limit / 1e9:,.0f}" for limit in limits), f"{reached / 1e9:,.0f} ({reached / limits[1]:.0%})"
        )
    return table


def points_of(rows: Sequence[Row], card: ModelCard) -> list[Point]:
    """Return the points of the roofline, one for each engine and case that was measured."""
    found = ((row, case, row.median_s(case)) for row in rows for case in CASES)
    return [Point(row.name, case, work_of(case, card, row.numbers), s) for row, case, s in found if s is not None]


def run(args: argparse.Namespace, console: Console) -> None:
    """Measure all rounds and print the table; draw the roofline when asked."""
    directory = resolve(args.model) if args.shape is None else shape_directory(args.shape)
    cases = [case for case in CASES if args.cases is None or case.name in args.cases]
    card = ModelCard.load(directory)
    with ExitStack() as stack:
        rows = rows_of(directory, card, args.threads, args.peers, stack, console)
        machines = []
        for number in range(args.rounds):
            console.print(f"round {number + 1} of {args.rounds}")
            machines.append(measure(args.threads))
            for case in cases:
                console.print(f"  {case.name}: ", end="")
                for row in rows:
                    row.measure(case)
                    if row.times[case]:
                        console.print(f"{row.name} {case.step_tokens / row.times[case][-1]:,.0f}", end="; ")
                console.print()
    machine = median_of(machines)
    title = (
        f"{card.name}, {args.threads} thread(s), tokens/s and share of the floor: "
        f"memory {machine.read_bytes_s / 1e9:.0f} GB/s, products of bfloat16 {machine.bf16_flops_s / 1e9:.0f} and of 8 bits "
        f"{machine.int8_flops_s / 1e9:.0f} GFLOP/s"
    )
    console.print(table_of(rows, card, machines, title, cases))
    console.print(products_of(rows, card, machine, library.find().isa))
    if args.plot is not None:
        plot(args.plot, title.split(",")[0], machine, points_of(rows, card))


def main() -> None:
    """Read the arguments and run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--shape", choices=SHAPES, help="a model of random weights instead")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cases", nargs="+", choices=[case.name for case in CASES], help="only these cases; the last one takes longest"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=ENGINES, default=None, help="engines to compare with; all if no name is given"
    )
    parser.add_argument("--plot", type=Path, help="file for the drawing of the roofline")
    args = parser.parse_args()
    args.peers = () if args.peers is None else args.peers or ENGINES
    torch.set_num_threads(args.threads)
    run(args, Console(width=160))


if __name__ == "__main__":
    main()
