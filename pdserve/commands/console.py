"""The console that all commands print on. What others wrote commands the terminal nothing."""

from __future__ import annotations

import contextlib
import os
import sys
import unicodedata
from collections.abc import Iterable
from typing import Final, TextIO, cast

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

WIDTH_OF_A_FILE = 160  # columns, where there is no terminal: tables keep all columns, and lines are not broken
COMMANDING: Final = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""The categories of Unicode whose characters command a terminal: C0 and C1 controls, bidirectional overrides and other formats,
halves of surrogate pairs, and separators of lines."""
HARMLESS: Final = "\n\t\u200c\u200d"
"""Characters of these categories that ordinary text needs: Persian and joined emoji have the last two."""


def plain(text: str) -> str:
    """Return the text without the characters that command a terminal. What follows an escape stays, as the text that it is."""
    if text.isprintable():
        return text
    return "".join(char for char in text if char in HARMLESS or unicodedata.category(char) not in COMMANDING)


def say(text: str, *, dim: bool = False) -> None:
    """Write a piece of a model's text to standard output at once. A terminal gets it plain, and a pipe or a file as it is."""
    if not text:
        return
    shown = plain(text) if sys.stdout.isatty() else text
    click.echo(click.style(shown, dim=True) if dim and sys.stdout.isatty() else shown, nl=False, color=True)


class PlainConsole(Console):
    """A console for texts of workers, clients and other processes. Only this program's own styles reach the terminal: such a
    text has no markup, and the characters in it that command a terminal are left out."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Return the segments of what is to be printed. Rich calls this for each part of it."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))


class SteadyOutput:
    """An output that goes quiet for good once it takes nothing more: its disk is full, its reader or its terminal is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._quiet = False

    @property
    def encoding(self) -> str:
        """The encoding of the text."""
        return self._stream.encoding

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        if not self._quiet:
            try:
                self._stream.write(text)
            except OSError:
                self._end()
        return len(text)

    def flush(self) -> None:
        """Write what is held back, or drop it."""
        if not self._quiet:
            try:
                self._stream.flush()
            except OSError:
                self._end()

    def isatty(self) -> bool:
        """Tell whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._stream.fileno()

    def _end(self) -> None:
        """Drop what the stream still holds as well: Python writes it at its exit, and would fail there."""
        self._quiet = True
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)


def make_console(*, steady: bool = False) -> Console:
    """Return a console that prints plain text unless standard output is a terminal. It never colours numbers by itself.

    steady: printing never fails, since the work goes on when nobody reads any more.
    """
    file = cast(TextIO, SteadyOutput(sys.stdout)) if steady else None
    return PlainConsole(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH_OF_A_FILE, file=file)
