"""Logging of every process of pdserve: one line format, written to stderr, set up once by the main of the process.

A thread writes the lines. So a disk that is slow, or a pipe that nobody reads, holds up nobody who logs; lines that find too
many waiting are lost, and counted. A line does not name the thread and the place in the code, so they are not looked up
(Python's logging HOWTO, "Optimization").
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from pdserve.core.errors import ConfigError
from pdserve.observe.log_files import empty_if_large

FORMAT: Final = "%(asctime)s.%(msecs)03d %(levelname)s %(process)d %(name)s: %(message)s"
DATE_FORMAT: Final = "%Y-%m-%dT%H:%M:%S"
LEVELS: Final = ("debug", "info", "warning", "error")
STDERR: Final = 2  # the descriptor: the stream's lock would be held for as long as a write waits
MAX_WAITING_BYTES: Final = 4 << 20  # 20,000 lines or more: far more than are written at once while somebody reads them
LOOK_S: Final = 5.0  # the file also grows by what native libraries and children write
FLUSH_S: Final = 2.0  # the end of a process waits at most so long for its last lines


class OneLine(logging.Formatter):
    """A formatter that escapes line breaks, so that a message from outside cannot forge a line. Tracebacks keep theirs."""

    def __init__(self) -> None:
        super().__init__(FORMAT, DATE_FORMAT)
        self._second = (-1, "")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Write the time to the second. Most lines share their second with the line before."""
        second = int(record.created)
        if second != self._second[0]:
            self._second = (second, super().formatTime(record, datefmt))
        return self._second[1]

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Format the message as one line."""
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


class WrittenByThread(logging.Handler):
    """A handler whose lines a thread writes to a descriptor. `file` is the file behind it, emptied when it is large."""

    def __init__(self, descriptor: int, file: Path | None = None) -> None:
        super().__init__()
        self.setFormatter(OneLine())
        self._descriptor = descriptor
        self._file = file
        self._waiting: SimpleQueue[bytes | threading.Event | None] = SimpleQueue()  # a signal's handler may log at any time
        self._taken_bytes = 0  # only whoever logs counts these, under the handler's lock
        self._lost = 0
        self._written_bytes = 0  # only the thread counts these
        self._told_lost = 0
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()
        if file is not None:
            threading.Thread(target=self._tick, name="log size", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Leave the line to the thread, or count it as lost."""
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # noqa: BLE001 - as every handler of the library does
            self.handleError(record)
            return
        if not self._thread.is_alive():  # in a fork
            self._write(line)
        elif self._taken_bytes - self._written_bytes > MAX_WAITING_BYTES:
            self._lost += 1
        else:
            self._taken_bytes += len(line)
            self._waiting.put(line)

    def flush(self) -> None:
        """Wait until the lines so far are written, for at most `FLUSH_S`."""
        if self._thread.is_alive():
            written = threading.Event()
            self._waiting.put(written)
            written.wait(FLUSH_S)

    def _run(self) -> None:
        while True:
            one = self._waiting.get()
            if isinstance(one, threading.Event):
                one.set()
                continue
            if one is not None:
                self._write(one)
                self._written_bytes += len(one)
            if self._lost != self._told_lost and self._waiting.empty():
                count, self._told_lost = self._lost - self._told_lost, self._lost
                self._write(f"{count} lines of the log are lost here: they came faster than they could be written\n".encode())
            if self._file is not None:
                empty_if_large(self._file)

    def _tick(self) -> None:
        """Let the thread look at the file now and then."""
        while True:
            time.sleep(LOOK_S)
            self._waiting.put(None)

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # the disk is full, or the reader has gone
            while line:
                line = line[os.write(self._descriptor, line) :]


def setup_logging(level: str = "info", *, file: Path | None = None) -> None:
    """Send the log of the whole process to stderr. `file`: stderr is this file, which this process keeps from growing without
    bound. Earlier handlers are replaced.

    Raises `ConfigError` for an unknown level.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"log level must be one of {', '.join(LEVELS)}, got {level!r}")
    logging.logThreads = logging.logMultiprocessing = False
    logging._srcfile = None
    root = logging.getLogger()
    root.handlers[:] = [WrittenByThread(STDERR, file)]
    root.setLevel(level.upper())


def flush_logs() -> None:
    """Wait until the lines so far are written, before a process ends at once. `logging.shutdown` does not know our handler any
    more once a library has configured logging."""
    for handler in logging.getLogger().handlers:
        handler.flush()
