"""Signals to stop. The first SIGINT or SIGTERM asks for a clean end, the second ends the process at once.

The first signal only sets an event, so nothing is raised while Ray starts or while things are cleaned up. The work runs
in a thread of its own, so that the main thread is always free to handle the second signal.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, TypeVar

from pdserve.commands.failures import INTERRUPTED

Result = TypeVar("Result")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"


class StopSignals:
    """The handler of the signals inside `with`. The first sets `event`; the second calls `at_once` and ends the process."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.at_once: Callable[[], None] = lambda: None
        self._before: dict[int, Any] = {}
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: the work is done

    def __enter__(self) -> StopSignals:
        self._before = self._install()
        return self

    def _install(self) -> dict[int, Any]:
        return {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def reclaim(self) -> None:
        """Install the handlers again. Any thread may call it. Ray's core replaces them by its own when it starts."""
        self._wake.put(False)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if not self.event.is_set():
            self.event.set()
            return
        try:
            self.at_once()
        finally:
            if sys.stdout.isatty():
                os.write(1, SHOW_CURSOR.encode())
            os.write(2, b"stopped at once\n")
            os._exit(INTERRUPTED)

    def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread, and return its result or raise its error."""
        outcome: list[Result] = []
        failure: list[BaseException] = []

        def body() -> None:
            try:
                outcome.append(work())
            except BaseException as exc:  # noqa: BLE001  the caller gets every error
                failure.append(exc)
            finally:
                self._wake.put(True)

        thread = threading.Thread(target=body, name="cluster")
        thread.start()
        while not self._wake.get():  # the handlers run during this wait; every wait of the work is bounded
            self._install()
        thread.join()
        if failure:
            raise failure[0]
        return outcome[0]
