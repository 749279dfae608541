"""The console that all commands print on."""

from __future__ import annotations

import sys

from rich.console import Console

WIDTH_OF_A_FILE = 160  # no terminal to fit: tables keep their columns, lines are not broken


def make_console() -> Console:
    """Plain text when standard output is not a terminal; numbers are never coloured by guesswork."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)
