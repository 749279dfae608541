"""The parser of one output: reasoning is split off, and calls are read from the rest."""

from __future__ import annotations

from pdserve.text.calls.events import CallArguments, CallBegin, CallEnd, Content, Event, EventList, EventParser
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

    def __init__(self, reasoning: EventParser | None, calls: EventParser | None, *, max_calls: int | None = None) -> None:
        """Calls beyond `max_calls` are read and dropped: nobody wants to see how a model spells them."""
        self._reasoning = reasoning
        self._calls = calls
        self._calls_left = max_calls
        self._dropping = False
        """True inside a call that is one too many."""
        self._blanks: list[str] = []
        """The blanks at the end of the content so far, in pieces. If a call follows, they belong to it."""
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
        if blanks := "".join(self._blanks):
            events.append(Content(blanks))
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
        """Take the blanks beside calls out of the content, and the calls that are too many."""
        kept = EventList()
        for event in events:
            if isinstance(event, Content):
                text = event.text.lstrip(BLANKS) if self._after_call else event.text
                clear = text.rstrip(BLANKS)
                if clear:
                    self._after_call = False
                    kept.say(Content, "".join(self._blanks))
                    kept.say(Content, clear)
                    self._blanks.clear()
                self._blanks.append(text[len(clear) :])
            elif isinstance(event, CallBegin):
                self._blanks.clear()
                self._dropping = self._calls_left == 0
                if not self._dropping:
                    self._calls_left = None if self._calls_left is None else self._calls_left - 1
                    kept.add(event)
            elif isinstance(event, CallEnd):
                self._after_call = True
                if not self._dropping:
                    kept.add(event)
            elif isinstance(event, CallArguments) and not self._dropping:
                kept.say(CallArguments, event.text)
        return kept.take()
