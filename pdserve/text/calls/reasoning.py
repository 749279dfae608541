"""The reasoning that a model writes between two tags before its answer."""

from __future__ import annotations

from collections.abc import Generator
from typing import Final

from pdserve.text.calls.events import Content, Event, Reasoning
from pdserve.text.calls.machine import BLANKS

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class ReasoningParser:
    """Splits an output into reasoning and content. Implements `EventParser`. Neither has the tags or the blanks beside them.

    The output begins inside the tags if the prompt ends with the first one. Otherwise it may begin with it. Tags at any other
    place are content.
    """

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt ends with the first tag."""
        self._events: list[Event] = []
        self._answering = False
        self._run = self._parse(opened)
        next(self._run)

    def push(self, text: str) -> list[Event]:
        """Implements `EventParser.push`."""
        for place, char in enumerate(text):
            if self._answering:
                self._add(Content(text[place:]))
                break
            self._run.send(char)
        return self._taken()

    def flush(self) -> list[Event]:
        """Implements `EventParser.flush`."""
        if not self._answering:
            self._run.send("")
        return self._taken()

    def _taken(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _add(self, event: Content | Reasoning) -> None:
        if not event.text:
            return
        last = self._events[-1] if self._events else None
        if type(last) is type(event) and isinstance(last, Content | Reasoning):
            event = type(event)(last.text + event.text)
            self._events.pop()
        self._events.append(event)

    def _parse(self, opened: bool) -> Generator[None, str, None]:
        """Take one character after the other until the answer begins. An empty one is the end of the text."""
        held = ""
        while not opened:
            char = yield
            held += char
            begun = held.lstrip(BLANKS)
            if begun == OPEN:
                opened = True
            elif not char or not OPEN.startswith(begun):
                self._add(Content(held))
                break
        if opened:
            yield from self._inside()
        self._answering = True
        yield

    def _inside(self) -> Generator[None, str, None]:
        """Tell reasoning up to the second tag, and skip the blanks after it. What may be the tag, or blanks before it, is
        held back."""
        held, begun = "", False
        while True:
            char = yield
            held += char
            if held.endswith(CLOSE):
                self._add(Reasoning(held[: -len(CLOSE)].rstrip(BLANKS)))
                break
            if not char:
                self._add(Reasoning(held))
                return
            if not begun:
                held = held.lstrip(BLANKS)
                begun = bool(held)
            told = held[: _held_from(held)]
            self._add(Reasoning(told))
            held = held[len(told) :]
        while char := (yield):
            if char not in BLANKS:
                self._add(Content(char))
                return


def _held_from(text: str) -> int:
    """Return where blanks begin that may stand before the second tag, or the tag itself, at the end of the text."""
    tag = text.rfind("<")
    if tag >= 0 and CLOSE.startswith(text[tag:]):
        text = text[:tag]
    return len(text.rstrip(BLANKS))
