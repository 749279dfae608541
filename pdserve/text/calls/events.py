"""The events that an output's text becomes: content, reasoning, and calls in pieces."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """A piece of the answer's text."""

    text: str


class Reasoning(NamedTuple):
    """A piece of the text that the model wrote to itself before its answer."""

    text: str


class CallBegin(NamedTuple):
    """The beginning of a call of the tool `name`. Its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """A piece of the arguments of the present call, which are the text of a JSON object."""

    text: str


class CallEnd(NamedTuple):
    """The end of the present call."""


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd


class EventList:
    """The events that become certain with one piece of text. Texts of one kind that follow each other are one event, which is
    joined once: a text of a million pieces costs a million steps."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._kind: type[Content | Reasoning | CallArguments] = Content
        self._texts: list[str] = []

    def say(self, kind: type[Content | Reasoning | CallArguments], text: str) -> None:
        """Add a text. An empty one adds nothing."""
        if not text:
            return
        if kind is not self._kind:
            self._join()
            self._kind = kind
        self._texts.append(text)

    def add(self, event: CallBegin | CallEnd) -> None:
        """Add an event that has no text."""
        self._join()
        self._events.append(event)

    def take(self) -> list[Event]:
        """Return the events so far. The list is empty then."""
        self._join()
        events, self._events = self._events, []
        return events

    def _join(self) -> None:
        if self._texts:
            self._events.append(self._kind("".join(self._texts)))
            self._texts.clear()


class EventParser(Protocol):
    """A parser of one output. How the text is cut into pieces changes only how the texts of events are cut."""

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text. Return the events that are certain with it."""

    def flush(self) -> list[Event]:
        """Return what is still held back. The text has ended."""
