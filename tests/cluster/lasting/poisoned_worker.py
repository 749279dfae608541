"""A real decode worker that one request ends: one whose prompt begins with `POISON`, at the 20th token of its output."""

from __future__ import annotations

import os
import signal
from typing import Any

from decode_worker import main
from decode_worker.role import DecodeRole
from pdserve.checkpoint.progress import Progress, silent
from pdserve.config import WorkerConfig
from pdserve.worker.process import RunningWorker

POISON = (13, 13, 13, 13)
DEADLY = 20


def start(config: WorkerConfig, progress: Progress = silent) -> RunningWorker:
    """Start the worker. Nothing else in it is changed."""
    poisoned: set[str] = set()
    begin, push = DecodeRole._begin, DecodeRole._token

    def begin_or_note(self: DecodeRole, command: Any, spec: Any, *more: Any) -> None:
        if spec.prompt_ids[: len(POISON)] == POISON:
            poisoned.add(command.request_id)
        begin(self, command, spec, *more)

    def push_or_die(self: DecodeRole, request: Any, token: Any) -> Any:
        if request.request_id in poisoned and token.output_index >= DEADLY:
            os.kill(os.getpid(), signal.SIGKILL)
        return push(self, request, token)

    DecodeRole._begin, DecodeRole._token = begin_or_note, push_or_die  # type: ignore[method-assign]
    return main.start(config, progress)
