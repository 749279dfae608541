"""Another process of the check. It prints lines of JSON as it gets ready, and ends when its standard input ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from tools.gpu.row import Setup

END_S = 20.0


@contextmanager
def other_process(setup: Setup, part: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Run the part `part` in another process, and yield the lines that it says. The process inherits the environment, and ends
    with this process's group at the latest.
    """
    command = [sys.executable, "-m", "tools.gpu_check", "--part", part, *setup.arguments]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield _said(child.stdout, part)
    finally:
        try:
            child.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()


def _said(output: IO[str], part: str) -> Iterator[dict[str, Any]]:
    """Yield each line of the other process. Each wait is bounded only by the time limit of this part. Raises `SystemExit` when
    the process ends.
    """
    while line := output.readline():
        yield json.loads(line)
    raise SystemExit(f"{part}: the other process ended before it was ready")


def say(**fields: Any) -> None:
    """Print one line of JSON. The other process calls this."""
    print(json.dumps(fields), flush=True)


def wait() -> None:
    """Wait until the asking process is done. The other process calls this."""
    sys.stdin.read()
