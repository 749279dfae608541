"""One log format for every process; lines go to standard error."""

from __future__ import annotations

import logging
import sys
from typing import Final

from pdserve.core.errors import ConfigError

LEVELS: Final = ("debug", "info", "warning", "error")
_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def configure_logging(level: str) -> None:
    """Raises `ConfigError` for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LEVELS)}, got {level!r}")
    logging.basicConfig(level=level.upper(), format=_FORMAT, stream=sys.stderr, force=True)
