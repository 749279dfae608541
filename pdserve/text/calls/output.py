"""The parser of one output: reasoning is split off, and calls are read from the rest."""

from __future__ import annotations

from pdserve.text.calls.events import CallArguments, CallBegin, CallEnd, Content, Event, EventParser
from pdserve.text.calls.machine import BLANKS


class NamedCall:
    """The output that a grammar makes for the choice of one tool: all of it is the arguments of one call. Implements
    `EventParser`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def push(self, text: str) -> list[Event]:
        """Implements `EventParser.push`."""
        if not text:
            return []
        begin: list[Event] = [] if self._begun else [CallBegin(self._name)]
        self._begun = True
        return [*begin, CallArguments(text)]

    def flush(self) -> list[Event]:
        """Implements `EventParser.flush`."""
        return [CallEnd()] if self._begun else []


class OutputParser:
    """Reads one output. Implements `EventParser`. Either part may be missing.

    Blanks directly before and after a call belong to the form of calls. All other blanks are content.
    """

    def __init__(self, reasoning: EventParser | None, calls: EventParser | None) -> None:
        self._reasoning = reasoning
        self._calls = calls
        self._blanks = ""
        """The blanks at the end of the content so far. If a call follows, they belong to it."""
        self._after_call = False

    def push(self, text: str) -> list[Event]:
        """Implements `EventParser.push`."""
        if not text:
            return []
        return self._read([Content(text)] if self._reasoning is None else self._reasoning.push(text))

    def flush(self) -> list[Event]:
        """Implements `EventParser.flush`."""
        events = [] if self._reasoning is None else self._read(self._reasoning.flush())
        if self._calls is not None:
            events += self._trimmed(self._calls.flush())
        if self._blanks:
            events.append(Content(self._blanks))
        return events

    def _read(self, events: list[Event]) -> list[Event]:
        """Read calls in the content among the events of reasoning."""
        if self._calls is None:
            return events
        read: list[Event] = []
        for event in events:
            read += self._trimmed(self._calls.push(event.text)) if isinstance(event, Content) else [event]
        return read

    def _trimmed(self, events: list[Event]) -> list[Event]:
        """Take the blanks beside calls out of the content."""
        kept: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                text = self._blanks + event.text
                text = text.lstrip(BLANKS) if self._after_call else text
                clear = text.rstrip(BLANKS)
                self._blanks = text[len(clear) :]
                if clear:
                    self._after_call = False
                    kept.append(Content(clear))
                continue
            if isinstance(event, CallBegin):
                self._blanks = ""
            self._after_call = self._after_call or isinstance(event, CallEnd)
            kept.append(event)
        return kept
