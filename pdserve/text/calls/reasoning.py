"""The reasoning that a model writes between two tags before its answer."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

from pdserve.text.calls.events import Content, Event, EventList, Reasoning
from pdserve.text.calls.machine import BLANKS

OPEN: Final = "<think>"
CLOSE: Final = "</think>"


class _Place(Enum):
    """Where in the output the parser is."""

    START = auto()
    INSIDE = auto()
    AFTER = auto()  # behind the second tag, among the blanks before the answer
    ANSWER = auto()


class ReasoningParser:
    """Splits an output into reasoning and content. Implements `EventParser`. Neither has the tags or the blanks beside them.

    The output begins inside the tags if the prompt ends with the first one. Otherwise it may begin with it. Tags at any other
    place are content.

    A model may write blanks or beginnings of a tag for as long as it likes. What is held back is therefore never read again:
    blanks are a list of pieces, and the beginning of a tag is shorter than the tag.
    """

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt ends with the first tag."""
        self._place = _Place.INSIDE if opened else _Place.START
        self._events = EventList()
        self._blanks: list[str] = []
        """Blanks that are told only if what follows them is not a tag."""
        self._tag = ""
        """The beginning of a tag, which is told if it does not become one."""
        self._begun = False
        """True once a character of reasoning was told, or held as one. Blanks before it are dropped."""

    def push(self, text: str) -> list[Event]:
        """Implements `EventParser.push`."""
        if self._place is _Place.START:
            text = self._start(text)
        if self._place is _Place.INSIDE:
            text = self._inside(text)
        if self._place is _Place.AFTER:
            text = text.lstrip(BLANKS)
            if text:
                self._place = _Place.ANSWER
        self._events.say(Content, text)
        return self._events.take()

    def flush(self) -> list[Event]:
        """Implements `EventParser.flush`."""
        if self._place is _Place.INSIDE:
            self._think(self._tag)
            self._events.say(Reasoning, "".join(self._blanks))
        else:
            self._events.say(Content, "".join([*self._blanks, self._tag]))
        self._blanks.clear()
        self._tag = ""
        return self._events.take()

    def _start(self, text: str) -> str:
        """Read the first tag, if the output begins with it. Return what stands behind it, or all if it is not there."""
        if not self._tag:
            clear = text.lstrip(BLANKS)
            self._blanks.append(text[: len(text) - len(clear)])
            text = clear
        text = self._tag + text
        if len(text) < len(OPEN) and OPEN.startswith(text):
            self._tag = text
            return ""
        if text.startswith(OPEN):
            self._place = _Place.INSIDE
            text = text[len(OPEN) :]
        else:
            self._place = _Place.ANSWER
            text = "".join([*self._blanks, text])
        self._blanks.clear()
        self._tag = ""
        return text

    def _inside(self, text: str) -> str:
        """Read reasoning up to the second tag. Return what stands behind it."""
        text = self._tag + text
        end = text.find(CLOSE)
        if end < 0:
            tag = text.rfind("<", max(0, len(text) - len(CLOSE) + 1))
            may_be_tag = tag >= 0 and CLOSE.startswith(text[tag:])  # the beginning of the second tag stands at the end
            end = tag if may_be_tag else len(text)
            self._tag = text[end:]
            self._think(text[:end])
            return ""
        self._think(text[:end])
        self._place = _Place.AFTER
        self._blanks.clear()
        self._tag = ""
        return text[end + len(CLOSE) :]

    def _think(self, text: str) -> None:
        """Tell reasoning, but for the blanks at its end."""
        if not self._begun:
            text = text.lstrip(BLANKS)
        if not text:
            return
        self._begun = True
        clear = text.rstrip(BLANKS)
        if clear:
            self._events.say(Reasoning, "".join(self._blanks))
            self._events.say(Reasoning, clear)
            self._blanks.clear()
        self._blanks.append(text[len(clear) :])
