"""Logging of every process of pdserve: one line format, written to stderr, set up once by the main of the process.

A line does not name the thread and the place in the code, so they are not looked up (Python's logging HOWTO, "Optimization").
"""

from __future__ import annotations

import logging
import sys
from typing import Final, TextIO

from pdserve.core.errors import ConfigError

FORMAT: Final = "%(asctime)s.%(msecs)03d %(levelname)s %(process)d %(name)s: %(message)s"
DATE_FORMAT: Final = "%Y-%m-%dT%H:%M:%S"
LEVELS: Final = ("debug", "info", "warning", "error")


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


def setup_logging(level: str = "info", *, stream: TextIO | None = None) -> None:
    """Send the log of the whole process to `stream`; None: stderr. Earlier handlers are replaced.

    Raises `ConfigError` for an unknown level.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"log level must be one of {', '.join(LEVELS)}, got {level!r}")
    logging.logThreads = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(OneLine())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
