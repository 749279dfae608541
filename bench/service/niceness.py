"""Compare a colocated worker at niceness 15 (Ray's default) with one at 0, beside busy processes.

Run it by `python -m bench.service.niceness`. Two clusters run at once, each started by `pdserve up` with `RAY_worker_niceness`
in its environment. They are asked in turns, so that both meet the same machine. The cluster that is not asked costs about 3 %
of a core.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from rich.console import Console
from rich.table import Table

from testkit.client import generate_all, request

NICENESS: Final = (15, 0)
STREAMS: Final = (1, 8)
OUTPUT_TOKENS: Final = 32  # short rounds, so that other load on the machine meets both
START_TIMEOUT_S: Final = 120.0
STOP_TIMEOUT_S: Final = 30.0
UP: Final = ("-m", "pdserve.cli", "up", "--prefill", "0", "--decode", "1", "--port", "0")
SPIN: Final = "while True: pass"


@contextlib.contextmanager
def running(niceness: int, folder: Path) -> Iterator[str]:
    """Run a cluster with a worker of this niceness; yield its gRPC address. Raises `RuntimeError` when it does not start."""
    output = folder / f"{niceness}.out"
    environment = {**os.environ, "RAY_worker_niceness": str(niceness)}
    with output.open("wb") as file, subprocess.Popen([sys.executable, *UP], stdout=file, env=environment) as child:
        try:
            end_s = time.monotonic() + START_TIMEOUT_S
            while "ready; Ctrl-C" not in output.read_text():
                if child.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError(f"`pdserve up` did not get ready:\n{output.read_text()}")
                time.sleep(0.1)
            address = re.search(r"^gRPC +(\S+)", output.read_text(), re.MULTILINE)
            assert address is not None
            yield address[1]
        finally:
            child.terminate()
            child.wait(STOP_TIMEOUT_S)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Run `count` processes that never rest."""
    children = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def tokens_s(address: str, streams: int) -> float:
    """Return the tokens a second of `streams` requests at once."""
    messages = [request(list(range(100, 116 + index)), max_tokens=OUTPUT_TOKENS, ignore_eos=True) for index in range(streams)]
    began = time.perf_counter()
    answers = generate_all(address, messages, concurrency=streams)
    elapsed_s = time.perf_counter() - began
    assert all(len(answer.ids) == OUTPUT_TOKENS for answer in answers)
    return streams * OUTPUT_TOKENS / elapsed_s


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--busy", type=int, default=1, help="processes that compute beside the worker")
    args = parser.parse_args()
    seen: dict[tuple[int, int], list[float]] = {(niceness, streams): [] for streams in STREAMS for niceness in NICENESS}
    with TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        addresses = {niceness: stack.enter_context(running(niceness, Path(folder))) for niceness in NICENESS}
        stack.enter_context(busy(args.busy))
        for number in range(args.rounds + 1):
            for niceness, streams in seen:
                rate = tokens_s(addresses[niceness], streams)
                if number:  # the first round warms up
                    seen[niceness, streams].append(rate)
    made = Table("streams", "niceness 15, tokens/s", "niceness 0, tokens/s", "ratio (quartiles of the rounds)")
    for streams in STREAMS:
        niced, plain = (seen[niceness, streams] for niceness in NICENESS)
        ratios = sorted(b / a for a, b in zip(niced, plain, strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        shown = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        made.add_row(str(streams), f"{statistics.median(niced):.0f}", f"{statistics.median(plain):.0f}", shown)
    Console().print(f"beside {args.busy} busy processes, medians of {args.rounds} rounds in turns", made)


if __name__ == "__main__":
    main()
