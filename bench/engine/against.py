"""Compares our engine's steps with those of another checkout of pdserve. Use it for a change that claims speed or no cost.

    git worktree add ../before main    # and `make setup` there, or a copy of .venv
    python -m bench.engine.against ../before [--threads 2] [--rounds 15] [--busy 0] [--cells B=1 B=8] [--quantization int8]

Each side is a process with its own code and kernels, and computes only when it is its turn. A cell is slower when the 95 %
interval of before / now lies below 1. --busy N starts N other processes that compute at the same time, as on a shared machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.engine.peers.cases import CASES, Case
from bench.engine.peers.peer import ROOT, Peer
from bench.ratios import Ratio, ratio

SIDES: Final = ("before", "now")
SERVER: Final = """
import sys
import torch
try:
    from bench.engine.peers.protocol import serve
except ImportError:  # a checkout from before the benchmarks had rooms
    from bench.engine_peers.protocol import serve

def start():
    try:
        from bench.engine.ours import OurEngine
    except ImportError:
        from bench.engine_ours import OurEngine
    from pdserve.checkpoint.card import ModelCard
    from pdserve.checkpoint.resolve import resolve

    model, threads, quantization = sys.argv[1:]
    torch.set_num_threads(int(threads))
    directory = resolve(model)
    engine = OurEngine(directory, ModelCard.load(directory), int(threads), quantization or None)
    return "pdserve", engine.seconds

serve(start)
"""
BUSY: Final = "import time\nend = time.monotonic() + 1800\nwhile time.monotonic() < end: pass"


@contextmanager
def side(checkout: Path, args: argparse.Namespace, log: Path) -> Iterator[Peer]:
    """Run the engine of a checkout as a process, with the checkout's own interpreter if it has one.

    The process starts in the checkout, so it imports the checkout's code.
    """
    own = checkout / ".venv" / "bin" / "python"
    command = (own if own.exists() else sys.executable, "-c", SERVER, args.model, str(args.threads), args.quantization)
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        try:
            yield Peer(process, log)
        finally:
            process.kill()


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Run `count` processes that only compute, for at most 30 minutes."""
    processes = [subprocess.Popen((sys.executable, "-c", BUSY)) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(sides: list[Peer], cells: list[Case], rounds: int) -> dict[Case, list[list[float]]]:
    """Return the seconds of each cell and side, round by round. The side that begins changes from round to round."""
    found: dict[Case, list[list[float]]] = {case: [[], []] for case in cells}
    for number in range(rounds):
        for case, times in found.items():
            for one in (0, 1) if number % 2 else (1, 0):
                times[one].append(sides[one].seconds(case))
    return found


def report(found: dict[Case, list[list[float]]], title: str) -> tuple[Table, list[str]]:
    """Return a table of the times, and the names of the cells that are slower now."""
    made, slower = Table("step", title=title), []
    for column in (*SIDES, "before / now", "95 %"):
        made.add_column(column, justify="right")
    for case, (before, now) in found.items():
        of: Ratio = ratio(before, now)
        times = (f"{1e3 * statistics.median(side):.1f} ms" for side in (before, now))
        made.add_row(case.name, *times, f"{of.median:.2f}", f"{of.low:.2f} to {of.high:.2f}")
        slower += [case.name] if of.high < 1 else []
    return made, slower


def main() -> int:
    """Print the comparison. The exit status is 1 when a cell is slower."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("--model", default="default")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--cells", nargs="+", default=[""], help="ends of the cells' names; default: all cells")
    parser.add_argument("--quantization", default="", choices=("", "int8", "int4"))
    args = parser.parse_args()
    cells = [case for case in CASES if any(case.name.endswith(end) for end in args.cells)]
    console = Console(width=100)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        places = zip((args.before.resolve(), ROOT), SIDES, strict=True)
        sides = [stack.enter_context(side(place, args, logs / f"{name}.log")) for place, name in places]
        stack.enter_context(busy_neighbours(args.busy))
        found = measure(sides, cells, args.rounds)
    beside = f", beside {args.busy} busy processes" if args.busy else ""
    title = f"{args.quantization or 'bfloat16'}, {args.threads} thread(s), {args.rounds} rounds{beside}"
    table, slower = report(found, title)
    console.print(table)
    console.print(f"slower: {', '.join(slower) or 'none'}")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
