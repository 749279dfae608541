"""The tests of the kernels, compiled and run on this device."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

from tools.gpu.row import Row, Setup

# An interpreter takes long: one file is enough to see that the part runs.
REHEARSED = ("tests/kernels/test_block_kernels.py",)


def run(setup: Setup) -> None:
    """Raises `SystemExit` with pytest's last lines when a test fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("xdist") and not setup.rehearsed:
        command += ["-n", "8"]
    command += REHEARSED if setup.rehearsed else ("tests/kernels",)
    environment = {**os.environ, "TRITON_INTERPRET": "1" if setup.rehearsed else "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    if done.returncode != 0:
        raise SystemExit("\n".join(done.stdout.splitlines()[-15:] + done.stderr.splitlines()[-5:]))
    counts = re.sub(r" in .*", "", last).strip("= ")
    note = "in the interpreter, one file" if setup.rehearsed else "compiled, on the device"
    Row("kernels", "tests/kernels against float64", counts, note=note).emit()
