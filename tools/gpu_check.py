"""Show what the GPU path does on this machine's GPU, in one table: correctness, then speed beside floors and peers.

    python -m tools.gpu_check [--rehearse] [--parts decode prefill]

The check needs no installation and no network: torch, Triton, numpy and msgspec beside a checkout are enough, and for some
parts NIXL or what a router needs. Each part runs in a process of its own with a time limit, and all together take less than
eight minutes. The parts that tell most run first. A part that cannot run says why, and a part that fails does not stop the
others. Without a GPU every part says so; --rehearse then runs all parts on CPU with tiny shapes, to see that they run. The exit
status is 1 when a part failed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from tools.gpu.row import Row, Setup

ROOT = Path(__file__).resolve().parent.parent
BUDGET_S = 465.0  # a command on a borrowed machine often has ten minutes, in which the table must be printed
REHEARSAL_TIMES = 4  # a part took over 35 s on a CPU with other load, and 9 s without
LEAST_S = 10.0  # importing torch and starting CUDA take most of it
NIXL = "nixl|nixl_cu12|nixl_cu13"


class Part(NamedTuple):
    """One part of the check. `needs` names the modules that it must find, alternatives with a bar between. It is ended after
    `limit_s`.
    """

    name: str
    module: str
    function: str
    needs: tuple[str, ...]
    limit_s: float


PARTS = (
    Part("machine", "machine", "run", (), 20),
    Part("nixl", "ipc", "run", (NIXL, "msgspec"), 25),
    Part("handoff", "handoff", "run", (NIXL, "msgspec", "safetensors"), 50),
    Part("serve", "serve", "run", (NIXL, "msgspec", "grpc_health", "grpc_reflection", "llguidance", "starlette"), 90),
    Part("kernels", "kernels", "run", ("triton", "pytest", "hypothesis", "msgspec"), 80),
    Part("engine", "engine", "run", ("triton", "safetensors", "msgspec"), 40),
    Part("attention", "attention", "run", ("triton",), 35),
    Part("families", "families", "run", ("triton",), 25),
    Part("decode", "steps", "run_decode", ("triton", "safetensors", "msgspec"), 40),
    Part("prefill", "steps", "run_prefill", ("triton", "safetensors", "msgspec"), 25),
    Part("ranks", "ranks", "run", ("safetensors", "msgspec"), 35),
    Part(
        "peer", "peers", "run", ("triton", "safetensors", "msgspec", "transformers"), 120
    ),  # at most; it gets what the others have left
)
OTHER_PROCESSES = (
    Part("lend", "ipc", "lend", (), 60),
    Part("prefill-side", "handoff", "lend", (), 60),
)
HEADER = Row("part", "case", "ours", "beside", "ratio", "note")


def reason_against(part: Part, setup: Setup) -> str:
    """Return the reason why a part cannot run here, or ""."""
    if not setup.rehearsed and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    missing = [names for names in part.needs if not any(map(importlib.util.find_spec, names.split("|")))]
    return f"not installed: {', '.join(names.replace('|', ' or ') for names in missing)}" if missing else ""


def run_part(part: Part, setup: Setup) -> tuple[list[Row], bool]:
    """Run a part. Return the rows that it printed, and whether it succeeded. If it failed, the last row says why."""
    command = [sys.executable, "-m", "tools.gpu_check", "--part", part.name, *setup.arguments]
    status, printed, complaints = run_bounded(command, environment_of(setup), setup.limit_s)
    rows = [replace(row, part=part.name) for row in rows_of(printed)]
    if status == 0:
        return rows, True
    print(f"--- {part.name}:\n{complaints[-3000:]}", file=sys.stderr)
    last = (complaints.strip().splitlines() or [f"exit status {status}"])[-1]
    note = f"not over after {setup.limit_s:.0f} s" if status is None else last[:160]
    return [*rows, Row(part.name, "", "FAILED", note=note)], False


def environment_of(setup: Setup) -> dict[str, str]:
    """Return the environment of a part's process."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # NIXL may lie in a folder that it names
    interpreted = {"TRITON_INTERPRET": "1"} if setup.rehearsed else {}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **interpreted}


def run_bounded(command: list[str], environment: dict[str, str], limit_s: float) -> tuple[int | None, str, str]:
    """Run a command. Return its exit status, or None past the limit, and what it printed to standard output and error.

    All processes that the command started end with it, also past the limit or when this process is interrupted.
    """
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    ) as child:
        try:
            printed, complaints = child.communicate(timeout=limit_s)
            return child.returncode, printed, complaints
        except subprocess.TimeoutExpired:
            end_group(child)
            return None, *child.communicate()
        finally:
            end_group(child)


def end_group(child: subprocess.Popen[str]) -> None:
    """Kill all processes of the child's group."""
    with suppress(ProcessLookupError):  # no process is left
        os.killpg(child.pid, signal.SIGKILL)


def rows_of(printed: str) -> list[Row]:
    """Return the rows among the lines that a part printed."""
    return [Row(**json.loads(line)) for line in printed.splitlines() if line.startswith('{"part"')]


def run_all(parts: list[Part], setup: Setup, show: Callable[[Row], None]) -> bool:
    """Run the parts one after the other, and show their rows. Return whether no part failed; a part that could not run did not
    fail.
    """
    ends_s = time.monotonic() + BUDGET_S
    went_well = True
    for part in parts:
        left_s = ends_s - time.monotonic()
        reason = reason_against(part, setup) or ("no time is left" if left_s < LEAST_S else "")
        if reason:
            show(Row(part.name, "", "skipped", note=reason))
            continue
        limit_s = part.limit_s * (REHEARSAL_TIMES if setup.rehearsed else 1)
        rows, well = run_part(part, replace(setup, limit_s=min(limit_s, left_s)))
        went_well &= well
        for row in rows:
            show(row)
    return went_well


def line(row: Row) -> str:
    """Return a row as one line of the table."""
    return f"{row.part:<11}{row.case:<40}{row.ours:<20}{row.beside:<24}{row.ratio:<9}{row.note}".rstrip()


def main() -> int:
    """Run the check, or one part in its own process. Return 0, or 1 when a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run on CPU with tiny shapes; times mean nothing")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="run only these parts")
    parser.add_argument("--part", choices=[part.name for part in (*PARTS, *OTHER_PROCESSES)], help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=BUDGET_S, help=argparse.SUPPRESS)
    args = parser.parse_args()
    setup = Setup(args.rehearse, args.limit_s)
    if args.part:
        part = next(part for part in (*PARTS, *OTHER_PROCESSES) if part.name == args.part)
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
