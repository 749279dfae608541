"""`python -m sim.faults`: run a swarm of seeds, one seed, or the matrix of directed faults."""

from __future__ import annotations

import argparse
import os
import sys

from sim.faults.matrix import MatrixReport, run_cell, run_matrix
from sim.faults.run import run_seed
from sim.faults.swarm import SwarmReport, failure_lines, run_swarm
from sim.faults.tap import Cell


def main() -> int:
    """Run what the command line asks for. Return 1 when a run failed or a cell was never reached, else 0."""
    parser = argparse.ArgumentParser(prog="python -m sim.faults", description=__doc__)
    parser.add_argument("--seed", type=int, help="run only this seed and print its outcome")
    parser.add_argument("--count", type=int, default=2000, help="number of seeds in the swarm; 0 runs no swarm")
    parser.add_argument("--first", type=int, default=1, help="first seed of the swarm")
    parser.add_argument("--matrix", action="store_true", help="run the matrix before the swarm")
    parser.add_argument("--cell", type=Cell.parse, help="run only this cell of the matrix")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="number of processes")
    options = parser.parse_args()
    if options.seed is not None:
        return _one(options.seed)
    if options.cell is not None:
        return _cell(options.cell)
    failed = False
    if options.matrix:
        matrix = run_matrix(jobs=options.jobs, progress=_show_matrix)
        _end_line()
        print(*matrix.lines(), sep="\n")
        failed = bool(matrix.failed or matrix.missed)
    if options.count == 0:
        return int(failed)
    swarm = run_swarm(options.first, options.count, jobs=options.jobs, progress=_show)
    _end_line()
    print(*swarm.lines(), sep="\n")
    return int(failed or bool(swarm.failed))


def _one(seed: int) -> int:
    report = run_seed(seed)
    print(f"seed {seed}: {dict(report.outcomes)}, {report.messages} messages, digest {report.digest:08x}")
    print(*(failure_lines(report) if report.problems else ["all checks hold"]), sep="\n")
    return 1 if report.problems else 0


def _cell(cell: Cell) -> int:
    report = run_cell(cell)
    print(f"cell {cell}: hit {report.hits}, {dict(report.run.outcomes)}, digest {report.run.digest:08x}")
    print(*(report.run.problems or ["all checks hold"]), sep="\n")
    return int(bool(report.run.problems))


def _show_matrix(matrix: MatrixReport) -> None:
    if sys.stderr.isatty():
        print(f"\r{len(matrix.cells)} cells, {len(matrix.failed)} failed", end="", file=sys.stderr, flush=True)


def _show(swarm: SwarmReport) -> None:
    """Show the progress. A failure is printed at once, so that an interrupted run has shown its findings."""
    if swarm.failed and swarm.failed[-1].seed == swarm.last_seed:
        _end_line()
        print(*failure_lines(swarm.failed[-1]), sep="\n", file=sys.stderr, flush=True)
    if sys.stderr.isatty() and swarm.runs % 10 == 0:
        print(f"\r{swarm.runs} seeds, {len(swarm.failed)} failed, {swarm.wall_s:.0f} s", end="", file=sys.stderr, flush=True)


def _end_line() -> None:
    if sys.stderr.isatty():
        print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
