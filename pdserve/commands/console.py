"""The console that all commands print on."""

from __future__ import annotations

import sys

from rich.console import Console

WIDTH_OF_A_FILE = 160  # columns, where there is no terminal: tables keep all columns, and lines are not broken


def make_console() -> Console:
    """Return a console that prints plain text unless standard output is a terminal. It never colours numbers by itself."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)
