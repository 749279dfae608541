"""A generation whose text is read for calls and reasoning before a front end gets it."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec

from pdserve.core.errors import Cancelled
from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason
from pdserve.text.calls.events import CallArguments, CallBegin, Content, Event, EventParser, Reasoning
from pdserve.text.calls.marks import MarkInserter
from router.api.answer import CallDelta, Delta, Generation


class ParsedGeneration:
    """Implements `router.api.answer.Generation` over another generation. Each delta keeps its ids and log-probabilities; its
    text becomes content, reasoning and pieces of calls."""

    def __init__(
        self, inner: Generation, parser: EventParser, new_id: Callable[[], str], marks: MarkInserter | None = None
    ) -> None:
        """`new_id` returns the id of the next call. `marks` puts special tokens into the text. None: the text has all marks."""
        self.request_id = inner.request_id
        self.prompt_len = inner.prompt_len
        self.prompt_ids = inner.prompt_ids
        self._inner = inner
        self._deltas = aiter(inner)
        self._parser = parser
        self._marks = marks
        self._new_id = new_id
        self._calls = 0
        self._parts: deque[Delta] = deque()

    @property
    def dropped(self) -> Cancelled | None:
        """Implements `Generation.dropped`."""
        return self._inner.dropped

    @property
    def report(self) -> Report:
        """Implements `Generation.report`."""
        return self._inner.report

    def on_stalled(self, callback: Callable[[], object]) -> None:
        """Implements `Generation.on_stalled`."""
        self._inner.on_stalled(callback)

    def take_by(self, taker: Callable[[Delta], bool]) -> None:
        """Implements `Generation.take_by`: the task gets all deltas, since none may be read twice."""

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if not self._parts:
            self._parts.extend(self._parsed(await anext(self._deltas)))
        return self._parts.popleft()

    def close(self) -> None:
        """Implements `Generation.close`."""
        self._inner.close()

    def _parsed(self, delta: Delta) -> list[Delta]:
        """Return what a delta becomes: one delta, or several if content follows a call, so that a reader who takes reasoning,
        content and calls of a delta in this order has the order of the output. The finish reason behind calls has a delta
        of its own, as at OpenAI, whose client looks for the end of calls before it looks at those of the same chunk."""
        text = delta.text if self._marks is None else self._marks.push(delta.ids, delta.text)
        events = self._parser.push(text)
        finish_reason = delta.finish_reason
        if finish_reason is not None:
            events += self._parser.flush()
        parts = [self._part(events) for events in _parts(events)]
        if finish_reason is not None and parts[-1]["calls"]:
            parts.append(self._part([]))
        if finish_reason is FinishReason.STOP and self._calls:
            finish_reason = FinishReason.TOOL_CALLS
        first = msgspec.structs.replace(delta, finish_reason=None, **parts[0])
        rest = [Delta(delta.index + len(delta.ids), (), finish_reason=None, **part) for part in parts[1:]]
        *early, last = first, *rest
        return [*early, msgspec.structs.replace(last, finish_reason=finish_reason, stop_reason=delta.stop_reason)]

    def _part(self, events: list[Event]) -> dict[str, Any]:
        """Return the fields of a delta that the events are."""
        content = "".join([event.text for event in events if isinstance(event, Content)])
        reasoning = "".join([event.text for event in events if isinstance(event, Reasoning)])
        return {"text": content, "reasoning": reasoning, "calls": self._pieces(events)}

    def _pieces(self, events: list[Event]) -> tuple[CallDelta, ...]:
        """Return the pieces of calls among the events. Pieces of the same call are joined."""
        pieces: list[CallDelta] = []
        for event in events:
            if isinstance(event, CallBegin):
                pieces.append(CallDelta(self._calls, self._new_id(), event.name))
                self._calls += 1
            elif isinstance(event, CallArguments):
                index = self._calls - 1
                begun = pieces.pop() if pieces and pieces[-1].index == index else CallDelta(index)
                pieces.append(CallDelta(index, begun.id, begun.name, begun.arguments + event.text))
        return tuple(pieces)


def _parts(events: list[Event]) -> list[list[Event]]:
    """Cut the events before each content that follows a call. There is one part at least."""
    parts: list[list[Event]] = [[]]
    called = False
    for event in events:
        if isinstance(event, Content) and called:
            parts.append([])
        called = not isinstance(event, Content | Reasoning)
        parts[-1].append(event)
    return parts
