"""Signals to stop. The first SIGINT or SIGTERM asks for a clean end, the second ends the process at once.

The kernel may deliver a signal between any two instructions, also while the handler of the one before runs. So no handler does
anything here: Python's own C handler writes the signal's number into a socket, and a thread reads it and acts, one signal
after the other. (A handler that set the event hung for ever when another signal came while it held the lock of the event.) The
work runs in a thread of its own as well, so that the main thread can take signals at any time.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, TypeVar

from pdserve.commands.failures import INTERRUPTED

Result = TypeVar("Result")
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR: Final = "\x1b[?25h"
AT_ONCE_S: Final = 10.0
"""The longest time for ending all processes at once. It takes a fraction of a second; nothing may hold up the second signal."""


class StopSignals:
    """The signals inside `with`. The first sets `event`; the second calls `at_once` and ends the process.

    Signals that come while the first is being taken count as the second, however soon after it they come. The kernel makes one
    of equal signals that it has not delivered yet.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.at_once: Callable[[], None] = lambda: None
        self._before: dict[int, Any] = {}
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: the work is done
        self._numbers, self._written = socket.socketpair()
        self._written.setblocking(False)  # so that the C handler never waits
        self._reader = threading.Thread(target=self._read, name="signals", daemon=True)

    def __enter__(self) -> StopSignals:
        self._reader.start()
        self._fd_before = signal.set_wakeup_fd(self._written.fileno(), warn_on_full_buffer=False)
        self._before = self._install()
        return self

    def _install(self) -> dict[int, Any]:
        return {number: signal.signal(number, _do_nothing) for number in SIGNALS}

    def reclaim(self) -> None:
        """Install the handlers again. Any thread may call it. Ray's core replaces them by its own when it starts."""
        self._wake.put(False)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._fd_before)
        self._written.close()  # the reader reads the end
        self._reader.join()
        self._numbers.close()

    def _read(self) -> None:
        """Take the signals in their order until the end of `with`."""
        while numbers := self._numbers.recv(64):
            for number in numbers:
                if number in SIGNALS:
                    self._take()

    def _take(self) -> None:
        if not self.event.is_set():
            self.event.set()
            return
        limit = threading.Timer(AT_ONCE_S, os._exit, (INTERRUPTED,))
        limit.daemon = True
        limit.start()
        try:
            self.at_once()
        finally:
            with contextlib.suppress(OSError, ValueError):  # a closed output must not keep the process
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
        while not self._wake.get():  # every wait of the work is bounded
            self._install()
        thread.join()
        if failure:
            raise failure[0]
        return outcome[0]


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Stand for a handler: without one Python would not write the number. It may be interrupted by itself at any place."""
