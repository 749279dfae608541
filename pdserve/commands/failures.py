"""The errors of commands. Each error is one line, `error: ...`, and an exit status: 2 for wrong settings, 1 otherwise."""

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
INTERRUPTED: Final = 130  # 128 + SIGINT, which is how shells report it


def one_line_errors(command: Callable[P, int | None]) -> Callable[P, None]:
    """Let the command end the process: with the status that it returns (None: 0), or with the error that it raises."""

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
    """Print the error on standard error and return `status`. A message may come from another process."""
    from pdserve.commands.console import plain

    click.echo(f"error: {plain(message)}", err=True)
    return status
