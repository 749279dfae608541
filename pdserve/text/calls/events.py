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


class EventParser(Protocol):
    """A parser of one output. How the text is cut into pieces changes only how the texts of events are cut."""

    def push(self, text: str) -> list[Event]:
        """Take the next piece of text. Return the events that are certain with it."""

    def flush(self) -> list[Event]:
        """Return what is still held back. The text has ended."""
