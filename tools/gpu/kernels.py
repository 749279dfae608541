"""The tests of the kernels, compiled and run on this device."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path

from tools.gpu.row import Row, Setup

# The interpreter is slow; one file is enough to see that the part runs.
REHEARSED = ("tests/kernels/test_quantise_kernel.py",)
MOST_FAILURES = 8  # that get a row
SPARE_S = 8.0  # left before the part is ended, to say how far the tests have come
_VERDICT = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$")


def run(setup: Setup) -> None:
    """Run the tests, and show which failed and how many passed. Raises `SystemExit` when a test fails or the time is over."""
    lines, over = tested(command(setup), setup.limit_s - SPARE_S, "1" if setup.rehearsed else "0")
    counts, failures = verdicts(lines)
    for test, why in failures[:MOST_FAILURES]:
        Row("kernels", test.rpartition("::")[2][:38], "FAILED", note=why[:160]).emit()
    said = ", ".join(f"{counts[name]} {name.lower()}" for name in ("PASSED", "FAILED", "ERROR", "SKIPPED") if counts[name])
    note = "in the interpreter, one file" if setup.rehearsed else "compiled, on the device"
    Row("kernels", "tests/kernels against float64", said or "none ran", note=note).emit()
    if not over:
        raise SystemExit(f"the tests were not over after {setup.limit_s - SPARE_S:.0f} s")
    if failures or not counts["PASSED"]:
        raise SystemExit("\n".join(lines[-15:]))


def command(setup: Setup) -> list[str]:
    """Return the command. It prints a line for each test, and at the end one for each that failed."""
    # No addopts: its strict markers need plugins that only an installed project has.
    # The plugin of benchmarks warns about xdist, and a warning is an error.
    settings = ["-o", "addopts=", "-v", "-rfE", "--tb=short", "-m", "not slow", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    if importlib.util.find_spec("xdist") and not setup.rehearsed:
        settings += ["-n", str(min(12, os.cpu_count() or 1))]  # each process has a CUDA context of its own, and compiles
    return [sys.executable, "-m", "pytest", *settings, *(REHEARSED if setup.rehearsed else ("tests/kernels",))]


def tested(command: list[str], limit_s: float, interpret: str) -> tuple[list[str], bool]:
    """Run the tests. Return the lines that they printed, and whether they ended by themselves within `limit_s`."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TRITON_INTERPRET": interpret, "COLUMNS": "200"}
        output = Path(folder, "output")
        with output.open("w") as file:
            child = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
            late = threading.Timer(limit_s, child.kill)
            late.start()
            status = child.wait()
            late.cancel()
        return output.read_text(errors="replace").splitlines(), status >= 0


def verdicts(lines: list[str]) -> tuple[Counter[str], list[tuple[str, str]]]:
    """Return the number of tests for each verdict, and the failed tests with the reasons that pytest gives."""
    counts: Counter[str] = Counter()
    failures = []
    for line in lines:
        if failure := _FAILURE.match(line):
            failures.append((failure[1], failure[2] or ""))
        elif "::" in line and (verdict := _VERDICT.search(line)):
            counts[verdict[1]] += 1
    return counts, failures
