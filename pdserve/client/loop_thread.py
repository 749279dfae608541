"""An event loop on a thread of its own, for callers whose own thread has a loop that runs already, such as notebooks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Self

from pdserve.core.errors import Unavailable


class LoopThread:
    """The loop of an LLM. It runs inside `with`; tasks that still run at its end are cancelled and waited for.

    It lives longer than one batch, because gRPC reports the end of a cancelled call to its loop after the batch.
    """

    def __enter__(self) -> Self:
        self._lock = threading.Lock()
        self._closed = False
        self._stop = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        # A program that closes nothing ends all the same: Python waits for other threads before `atexit`, which closes this.
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, soon and in the order of these calls. Raises `Unavailable` when the loop is closed."""
        with self._lock:
            if self._closed:
                raise Unavailable("this LLM is closed")
            self.loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        with self._runner as runner:
            runner.run(self._stop.wait())
