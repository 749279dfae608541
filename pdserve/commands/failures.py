"""Every error of a command is one line, `error: ...`, and an exit status: 2 for wrong settings, 1 otherwise."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Final, ParamSpec

import click

from pdserve.core.errors import ConfigError, PdserveError

P = ParamSpec("P")

FAILED: Final = 1
BAD_SETTING: Final = 2
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it


def one_line_errors(command: Callable[P, int | None]) -> Callable[P, None]:
    """Turn what a command raises, or returns, into the process's end."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            status = command(*args, **kwargs)
        except ConfigError as exc:
            sys.exit(report(exc.message, BAD_SETTING))
        except PdserveError as exc:
            sys.exit(report(exc.message, FAILED))
        sys.exit(status or 0)

    return run


def report(message: str, status: int) -> int:
    click.echo(f"error: {message}", err=True)
    return status
