"""How an engine's process answers: a line of JSON in, a line of JSON out. Standard library only.

Out first {"ready": VERSION}; then for each {"case": {...}} in either {"seconds": S}, the mean time of one such step, or
{"error": WHY}. The process ends with its input. What libraries print goes to stderr, so that lines are answers only.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from bench.engine.peers.cases import Case

Timer = Callable[[Case], float]


def serve(start: Callable[[], tuple[str, Timer]]) -> None:
    """start() loads the engine: its version, and what times a case, warm."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    version, timer = start()
    print(json.dumps({"ready": version}), file=answers)
    for line in sys.stdin:
        try:
            answer: dict[str, object] = {"seconds": timer(Case(**json.loads(line)["case"]))}
        except Exception as exc:  # noqa: BLE001 - an engine's errors are its own; the table names them
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), file=answers)
