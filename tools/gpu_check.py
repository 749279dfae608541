"""What the GPU path does on this machine's GPU, in one table: correctness, then speed beside floors and peers.

    python -m tools.gpu_check [--rehearse] [--parts decode prefill]

Needs no installation and no network: torch, Triton and numpy beside a checkout. Each part runs in a process of its own
with a time limit, all together in under eight minutes; one that cannot run says why, and one that fails spoils no
other. Without a GPU every part says so; --rehearse then runs them all on CPU with tiny shapes, to see that they run.
Exits with 1 when a part failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from tools.gpu.row import Row, Setup

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 465.0  # a command on a borrowed machine often has ten minutes; the table must be printed before


class Part(NamedTuple):
    name: str
    module: str
    function: str
    needs: tuple[str, ...]
    limit_s: float


PARTS = (
    Part("machine", "machine", "run", (), 40),
    Part("kernels", "kernels", "run", ("triton", "pytest", "hypothesis"), 150),
    Part("attention", "attention", "run", ("triton",), 80),
    Part("decode", "steps", "run_decode", ("triton", "safetensors"), 90),
    Part("prefill", "steps", "run_prefill", ("triton", "safetensors"), 60),
    Part("peer", "peers", "run", ("triton", "safetensors", "transformers"), 120),
    Part("nixl", "ipc", "run", ("nixl",), 60),
)
HIDDEN_PARTS = (Part("lend", "ipc", "lend", ("nixl",), 60),)  # the other process of `nixl`
HEADER = Row("part", "case", "ours", "beside", "ratio", "note")


def reason_against(part: Part, setup: Setup) -> str:
    """Why a part cannot run here, or nothing."""
    if not setup.rehearsed and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def run_part(part: Part, setup: Setup, limit_s: float) -> tuple[list[Row], bool]:
    """The rows that a part printed, the last saying what went wrong, and whether it went well."""
    command = [sys.executable, "-m", "tools.gpu_check", "--part", part.name, *(["--rehearse"] if setup.rehearsed else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if setup.rehearsed:
        environment["TRITON_INTERPRET"] = "1"
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as exc:
        printed = exc.stdout.decode() if isinstance(exc.stdout, bytes) else (exc.stdout or "")
        return [*rows_of(printed), Row(part.name, "", "FAILED", note=f"not over after {limit_s:.0f} s")], False
    rows = rows_of(done.stdout)
    if done.returncode == 0:
        return rows, True
    print(f"--- {part.name}:\n{done.stderr[-3000:]}", file=sys.stderr)
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return [*rows, Row(part.name, "", "FAILED", note=last[:120])], False


def rows_of(printed: str) -> list[Row]:
    return [Row(**json.loads(line)) for line in printed.splitlines() if line.startswith('{"part"')]


def run_all(parts: list[Part], setup: Setup, show: Callable[[Row], None]) -> bool:
    """Whether no part failed. A part that could not run did not fail."""
    ends_s = time.monotonic() + BUDGET_S
    went_well = True
    for part in parts:
        left_s = ends_s - time.monotonic()
        reason = reason_against(part, setup) or ("no time is left" if left_s < 10 else "")
        if reason:
            show(Row(part.name, "", "skipped", note=reason))
            continue
        rows, well = run_part(part, setup, min(part.limit_s, left_s))
        went_well &= well
        for row in rows:
            show(row)
    return went_well


def line(row: Row) -> str:
    return f"{row.part:<10}{row.case:<40}{row.ours:<20}{row.beside:<24}{row.ratio:<9}{row.note}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="on CPU with tiny shapes: times mean nothing")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these")
    parser.add_argument("--part", choices=[part.name for part in (*PARTS, *HIDDEN_PARTS)], help=argparse.SUPPRESS)
    args = parser.parse_args()
    setup = Setup(args.rehearse)
    if args.part:
        part = next(part for part in (*PARTS, *HIDDEN_PARTS) if part.name == args.part)
        getattr(importlib.import_module(f"tools.gpu.{part.module}"), part.function)(setup)
        return 0
    began_s = time.monotonic()
    print(line(HEADER), flush=True)
    parts = [part for part in PARTS if not args.parts or part.name in args.parts]
    went_well = run_all(parts, setup, lambda row: print(line(row), flush=True))
    print(f"{time.monotonic() - began_s:.0f} s; torch {torch.__version__}, Python {sys.version.split()[0]}")
    return 0 if went_well else 1


if __name__ == "__main__":
    sys.exit(main())
