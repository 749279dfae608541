"""Scaling policies that work, and those that fail in every way that a function can. Each is run in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from pdserve.planner.policy import ScalingContext


def three(context: ScalingContext) -> int:
    return 3


def many(context: ScalingContext) -> int:
    return 9_999


def seen(context: ScalingContext) -> int:
    """Say in numbers what was seen."""
    assert context.version == 1
    assert context.role.value == "prefill"
    assert context.pool is context.observations.prefill
    assert context.observations.demand.longest_wait_s is None
    assert (context.min_workers, context.max_workers, context.targets.attainment) == (1, 9, 0.99)
    return context.workers + int(context.observations.demand.queued_requests or 0)


def prints(context: ScalingContext) -> int:
    print('{"number": 1, "workers": 7}', flush=True)
    os.write(1, b"garbage\n" * 10_000)
    os.write(2, b"more garbage\n")
    assert sys.stdin.read() == ""
    return 3


def raises(context: ScalingContext) -> int:
    return 1 // 0


def exits(context: ScalingContext) -> int:
    sys.exit("done")


def raises_oddly(context: ScalingContext) -> int:
    class Odd(BaseException):
        def __str__(self) -> str:
            raise ValueError

    raise Odd


def dies(context: ScalingContext) -> int:
    os._exit(7)


def hangs(context: ScalingContext) -> int:
    threading.Event().wait()
    return 3


def spins(context: ScalingContext) -> int:
    """Never let another thread of the process run."""
    note("spins")
    re.match(r"(a+)+$", "a" * 64 + "b")
    return 3


def has_children(context: ScalingContext) -> int:
    child = subprocess.Popen(["sleep", "600"])
    note(str(child.pid))
    time.sleep(600)
    return 3


def eats_memory(context: ScalingContext) -> int:
    eaten = []
    while True:
        eaten.append(bytes(1 << 30))


def writes_to_every_pipe(context: ScalingContext) -> int:
    for descriptor in range(3, 30):
        try:
            os.write(descriptor, b"[" * 60_000 + b"\n")
        except OSError:
            continue
    return 3


def closes_every_pipe(context: ScalingContext) -> int:
    os.closerange(3, 30)
    return 3


def healing(context: ScalingContext) -> int:
    """Fail until the file is there."""
    if not Path(os.environ["POLICY_NOTE"]).exists():
        raise RuntimeError("not yet")
    return 5


def nan(context: ScalingContext) -> Any:
    return float("nan")


def negative(context: ScalingContext) -> Any:
    return -1


def text(context: ScalingContext) -> Any:
    return "3"


def true(context: ScalingContext) -> Any:
    return True


def huge(context: ScalingContext) -> Any:
    return 10**5_000


def billion(context: ScalingContext) -> Any:
    return 1e9


def nothing(context: ScalingContext) -> Any:
    return None


def long_bytes(context: ScalingContext) -> Any:
    return b"\0" * (1 << 20)


def surrogate(context: ScalingContext) -> Any:
    raise RuntimeError("\udcff" * 10_000)


NOT_CALLABLE = 3


def note(words: str) -> None:
    Path(os.environ["POLICY_NOTE"]).write_text(words)
