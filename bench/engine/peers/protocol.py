"""The protocol of an engine's process: a line of JSON is a request or an answer. Standard library only.

The process first writes {"ready": VERSION}. Then it reads requests {"case": {...}} and answers each with {"seconds": S}, the
mean time of one such step, or with {"error": WHY}. It ends when its input ends. The output of libraries goes to stderr, so
stdout has only answers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from bench.engine.peers.cases import Case

Timer = Callable[[Case], float]


def serve(start: Callable[[], tuple[str, Timer]]) -> None:
    """Answer requests until the input ends.

    start() loads the engine and returns its version and a function that times a case, in seconds, after a warm-up.
    """
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
