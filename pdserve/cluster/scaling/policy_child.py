"""The process of one scaling policy: `python -m pdserve.cluster.scaling.policy_child SETTING MODULE:FUNCTION`.

A question and its answer are JSON. Its parent may kill it at any time, whatever the policy does then, and so does the kernel
once the parent has gone. What a policy prints goes to the log.
"""

from __future__ import annotations

import contextlib
import operator
import os
import resource
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from pdserve.core.errors import ConfigError
from pdserve.killable_child import open_channel
from pdserve.planner.limits import MOST_WORKERS
from pdserve.planner.policy import ScalingContext
from pdserve.plugins import resolve

MEMORY_BYTES: Final = 4 << 30
"""The private memory that a policy may have. Threads of a library for arrays take half of it on a machine with many cores."""
FIRST_TO_GO: Final = "1000"  # the kernel ends this process first where memory runs out
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
    """Answer questions until the parent closes the pipe."""
    setting, name = sys.argv[1:]
    channel = open_channel("policy")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    try:
        policy = resolve(name, {}, setting)
    except BaseException as exc:  # noqa: BLE001 - it is the operator's code
        detail = exc.message if isinstance(exc, ConfigError) else _words(exc)
        channel.send(_encoded(Answer(fault="cannot_start", detail=detail)))
        os._exit(USAGE_ERROR)

    def answer(message: bytes) -> bytes:
        question = msgspec.json.decode(message, type=Question)
        size = answer_of(policy, question.context)
        size.number = question.number
        return _encoded(size)

    channel.serve(answer, greeting=_encoded(Answer()))
    os._exit(0)  # threads of the policy may go on


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


def _encoded(answer: Answer) -> bytes:
    answer.detail = answer.detail[:TEXT_CHARS]
    return msgspec.json.encode(answer)


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
