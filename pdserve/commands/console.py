"""The console that all commands print on. What others wrote commands the terminal nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

WIDTH_OF_A_FILE = 160  # columns, where there is no terminal: tables keep all columns, and lines are not broken


def plain(text: str) -> str:
    """Return the text without the characters that command a terminal. Ends of lines stay."""
    return text if text.isprintable() else "".join(char for char in text if char.isprintable() or char == "\n")


class PlainConsole(Console):
    """A console for texts of workers, clients and other processes. Only this program's own styles reach the terminal: such a
    text has no markup, and the characters in it that command a terminal are left out."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of what is to be printed. Rich calls this for each part of it."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


def make_console() -> Console:
    """Return a console that prints plain text unless standard output is a terminal. It never colours numbers by itself."""
    return PlainConsole(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE)
