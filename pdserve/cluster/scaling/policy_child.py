"""The process of one scaling policy: `python -m pdserve.cluster.scaling.policy_child SETTING MODULE:FUNCTION`.

Lines of JSON come on standard input, a `Question` each, and the answers go to standard output. Before any code of the operator
runs, both are moved to other descriptors, so that what a policy prints goes to the log. The process ends as soon as its
input closes, whatever the policy does then: a thread reads it, and the kernel ends the process together with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import queue
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from pdserve.core.errors import ConfigError
from pdserve.planner.limits import MOST_WORKERS
from pdserve.planner.policy import ScalingContext
from pdserve.plugins import resolve

MEMORY_BYTES: Final = 4 << 30
"""The private memory that a policy may have. Threads of a library for arrays take half of it on a machine with many cores."""
FIRST_TO_GO: Final = "1000"  # the kernel ends this process first where memory runs out
PR_SET_PDEATHSIG: Final = 1
TEXT_CHARS: Final = 300
USAGE_ERROR: Final = 2


class Question(msgspec.Struct):
    """A question for a size."""

    number: int
    context: ScalingContext


class Answer(msgspec.Struct):
    """An answer to a question, or to the start (number 0). A size or a fault: "cannot_start", "raised" or "not_a_size"."""

    number: int = 0
    workers: int | None = None
    fault: str = ""
    detail: str = ""


def main() -> None:
    """Answer questions until the input closes."""
    setting, name = sys.argv[1:]
    questions, answers = _moved()
    _restrict()
    lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(questions, lines), daemon=True).start()
    try:
        policy = resolve(name, {}, setting)
    except BaseException as exc:  # noqa: BLE001 - it is the operator's code
        _send(answers, Answer(fault="cannot_start", detail=exc.message if isinstance(exc, ConfigError) else _words(exc)))
        os._exit(USAGE_ERROR)
    _send(answers, Answer())
    while True:
        question = msgspec.json.decode(lines.get(), type=Question)
        answer = answer_of(policy, question.context)
        answer.number = question.number
        _send(answers, answer)


def answer_of(policy: Callable[[ScalingContext], Any], context: ScalingContext) -> Answer:
    """Return the policy's size, or what is wrong with it."""
    try:
        value = policy(context)
    except BaseException as exc:  # noqa: BLE001 - it is the operator's code: sys.exit ends nothing here
        traceback.print_exc()
        return Answer(fault="raised", detail=f"it raised {_words(exc)}")
    try:
        if not isinstance(value, bool) and 0 <= (workers := operator.index(value)) <= MOST_WORKERS:
            return Answer(workers=int(workers))
    except BaseException:  # noqa: BLE001 - an object of the operator's
        pass
    return Answer(fault="not_a_size", detail=f"it returned {_shown(value)}, not a whole number from 0 to {MOST_WORKERS}")


def _moved() -> tuple[BinaryIO, BinaryIO]:
    """Return the input and the output under other descriptors. The first two become an empty input and the log."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return questions, answers


def _restrict() -> None:
    """Let the kernel end this process with its parent, and bound its memory."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)


def _read(questions: BinaryIO, lines: queue.SimpleQueue[bytes]) -> None:
    for line in questions:
        lines.put(line)
    os._exit(0)  # the parent has closed the input, or is gone


def _send(answers: BinaryIO, answer: Answer) -> None:
    answer.detail = answer.detail[:TEXT_CHARS]
    answers.write(msgspec.json.encode(answer) + b"\n")


def _words(exc: BaseException) -> str:
    """Return an exception in words."""
    try:
        return f"{type(exc).__name__}: {exc}".rstrip(": ").encode("utf-8", "replace").decode()
    except BaseException:  # noqa: BLE001 - its text is the operator's code as well
        return type(exc).__name__


def _shown(value: object) -> str:
    """Return a value as text of bounded length, or its type where it has none."""
    try:
        return f"{value!r:.50}".encode("utf-8", "replace").decode()
    except BaseException:  # noqa: BLE001 - a number of many digits, or an object of the operator's
        return f"an object of type {type(value).__name__}"


if __name__ == "__main__":
    main()
