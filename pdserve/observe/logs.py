"""How every process of pdserve logs: one line format, to stderr, set up once by its main."""

from __future__ import annotations

import logging
import sys
from typing import Final, TextIO

from pdserve.core.errors import ConfigError

FORMAT: Final = "%(asctime)s.%(msecs)03d %(levelname)s %(process)d %(name)s: %(message)s"
DATE_FORMAT: Final = "%Y-%m-%dT%H:%M:%S"
LEVELS: Final = ("debug", "info", "warning", "error")


class OneLine(logging.Formatter):
    """A message from outside may hold line breaks; escaped, it cannot forge a line of its own. Tracebacks stay."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\r", "\\r").replace("\n", "\\n")


def setup_logging(level: str = "info", *, stream: TextIO | None = None) -> None:
    """Send the whole process's log to `stream` (stderr). Replaces earlier handlers. Raises `ConfigError`."""
    if level.lower() not in LEVELS:
        raise ConfigError(f"log level must be one of {', '.join(LEVELS)}, got {level!r}")
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(OneLine(FORMAT, DATE_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
