"""`python -m tools.tile_counts`: counts the instructions of AMX in steps of the default model, and predicts their time.

A CPU without AMX refuses each instruction, and a handler counts it (tests/engine/native/tiles_check.cpp). It computes nothing
here, so the results of the steps mean nothing. It takes minutes, and must run on a CPU without AMX.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.engine.ours import OurEngine
from bench.engine.peers.cases import CASES, Case
from pdserve.checkpoint.card import ModelCard
from pdserve.checkpoint.resolve import resolve
from pdserve.engine.native import library

ROOT: Final = Path(__file__).resolve().parents[1]
COUNTED: Final = ("shapes", "zeros", "loads", "stores", "products", "products of bytes")
PRODUCT_FLOP: Final = 2 * 16 * 16 * 32
BYTE_PRODUCT_OP: Final = 2 * PRODUCT_FLOP
RATE: Final = 2.12e12
"""FLOP/s of four products with four loads from the second cache, one thread of an Intel Xeon. Bytes have twice as many."""
READ_BYTES_PER_S: Final = 39e9
"""Weights that one thread of that CPU read from its third cache while it multiplied one row."""


def handler(directory: Path) -> ctypes.CDLL:
    """Build and open the handler that counts refused instructions."""
    modules = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    flags = next(module for module in modules if module["name"].endswith("._kernels_amx"))["extra-compile-args"]
    source, path = ROOT / "tests/engine/native/tiles_check.cpp", directory / "tiles_check.so"
    include = ROOT / "pdserve/engine/native/src"
    subprocess.run(["g++", *flags, f"-I{include}", "-fPIC", "-shared", str(source), "-o", str(path)], check=True, timeout=600)
    return ctypes.CDLL(str(path))


def counts_of(counting: ctypes.CDLL, engine: OurEngine, case: Case) -> dict[str, int]:
    """Return how often each instruction runs in the step of a case."""
    found = (ctypes.c_long * len(COUNTED))()
    counting.tiles_trap(1)
    try:
        for plan in engine.plans(case):
            engine.runner.execute(plan)
    finally:
        counting.tiles_untrap(found)
    return dict(zip(COUNTED, found, strict=True))


def predicted_s(counts: dict[str, int], weight_bytes: int) -> float:
    """Return the seconds of the products of one thread: as fast as tiles multiply, or as weights are read."""
    operations = counts["products"] * PRODUCT_FLOP + counts["products of bytes"] * BYTE_PRODUCT_OP / 2
    return max(operations / RATE, weight_bytes / READ_BYTES_PER_S)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quantization", choices=("int8", "int4"), default=None)
    parser.add_argument("--cells", nargs="*", default=[case.name for case in CASES], metavar="CASE")
    args = parser.parse_args()
    path = library.installed("_kernels_amx")
    if path is None or library.open_library(path).library is not None:
        print("error: this needs a library of amx that this CPU does not run", file=sys.stderr)
        return 2
    loaded: Any = ctypes.CDLL(str(path))
    library.load = lambda: library.declared(loaded)
    directory = resolve("default")
    card = ModelCard.load(directory)
    bits = {None: 16, "int8": 8, "int4": 5}[args.quantization]
    weights = card.spec.numbers * bits // 8
    table = Table(
        "step", *COUNTED, "products of one thread, predicted", title=f"instructions of AMX, {args.quantization or 'bfloat16'}"
    )
    with tempfile.TemporaryDirectory() as temporary:
        counting = handler(Path(temporary))
        counting.tiles_trap(1)
        try:
            engine = OurEngine(directory, card, 1, args.quantization)  # it measures its memory by computing
        finally:
            counting.tiles_untrap((ctypes.c_long * len(COUNTED))())
        for case in CASES:
            if case.name in args.cells:
                counts = counts_of(counting, engine, case)
                table.add_row(
                    case.name, *(f"{counts[name]:,}" for name in COUNTED), f"{1e3 * predicted_s(counts, weights):.1f} ms"
                )
    Console(width=200).print(table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
