"""The answer of `/v1/responses`: one object, or events that build it up.

A streamed token costs one JSON-encoded string, as in a chat. The objects that open and close a stream are written once each.
"""

from __future__ import annotations

import time
from typing import Any, Final

from pdserve.core.errors import PdserveError
from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason
from router.api.answer import CallDelta, Delta, report_json
from router.openai.chunks import ReasoningTokens
from router.openai.json import encode_json, error_payload
from router.openai.responses.output import IN_PROGRESS, CallOutput, Event, MessageOutput, OutputItem, ReasoningOutput
from router.openai.responses.request import ResponsesCall

COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
FAILED: Final = "failed"
_STATELESS: Final[dict[str, Any]] = {
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}
"""Fields of every answer. A request that sets one of them to another value is refused."""


class ResponseWriter:
    """Writes one answer from its deltas: the events of a stream, and the object at its end, which is also the whole answer."""

    def __init__(self, asked: ResponsesCall, model: str) -> None:
        own = {"id": f"resp_{asked.request_id}", "object": "response", "created_at": int(time.time()), "model": model}
        self._head = encode_json({**own, **_STATELESS})[:-1] + b"," + asked.repeated
        self._request_id = asked.request_id
        self._number = 0
        self._items: list[bytes] = []
        self._item: OutputItem | None = None
        self._early: list[bytes] = []
        """Log-probabilities of tokens that no item has yet, since their text is not certain."""
        self._reasoning = ReasoningTokens()

    def opening(self) -> bytes:
        """Return the events before the first token."""
        response = b'"response":' + self._response(IN_PROGRESS)
        return self._written([(b"created", response), (b"in_progress", response)])

    def delta(self, delta: Delta, logprobs: bytes) -> bytes:
        """Return the events of a delta, with the log-probabilities of its tokens as entries of a JSON list."""
        if logprobs:
            self._early.append(logprobs)
        self._reasoning.add(delta)
        events: list[Event] = []
        if delta.reasoning:
            events += self._reason(delta)
        if delta.text:
            events += self._say(delta.text)
        for piece in delta.calls:
            events += self._call(piece)
        return self._written(events) if events else b""

    def closing(self, reason: FinishReason, report: Report) -> bytes:
        """Return the events after the last token."""
        status = _status(reason)
        events = self._last(status)
        events.append((status.encode(), b'"response":' + self._ended(status, report)))
        return self._written(events)

    def whole(self, reason: FinishReason, report: Report) -> bytes:
        """Return the answer that is not streamed."""
        status = _status(reason)
        self._last(status)
        return self._ended(status, report)

    def failed(self, error: PdserveError, report: Report | None) -> bytes:
        """Return the last event of a stream that an error ends."""
        told = error_payload(error)["error"]
        rest = {} if report is None else {"pdserve": report_json(report)}
        failure = {"code": told["code"], "message": told["message"]}
        return self._written([(b"failed", b'"response":' + self._response(FAILED, error=failure, **rest))])

    def _reason(self, delta: Delta) -> list[Event]:
        self._early.clear()
        item, events = self._item, []
        if not isinstance(item, ReasoningOutput):
            item = ReasoningOutput(self._id("rs"), len(self._items) + (item is not None))
            events = self._turn_to(item)
        return [*events, item.delta(delta.reasoning)]

    def _say(self, text: str) -> list[Event]:
        logprobs = b",".join(self._early)
        self._early.clear()
        item = self._item
        if isinstance(item, MessageOutput):
            return [item.delta(text, logprobs)]
        item = MessageOutput(self._id("msg"), len(self._items) + (item is not None))
        return [*self._turn_to(item), item.delta(text, logprobs)]

    def _call(self, piece: CallDelta) -> list[Event]:
        self._early.clear()
        item, events = self._item, []
        if piece.id or not isinstance(item, CallOutput):
            item = CallOutput(self._id("fc"), len(self._items) + (item is not None), piece.id, piece.name)
            events = self._turn_to(item)
        return [*events, item.delta(piece.arguments)] if piece.arguments else events

    def _turn_to(self, item: OutputItem) -> list[Event]:
        """End the present item and begin another one."""
        return [*self._end(COMPLETED), *self._begun(item)]

    def _begun(self, item: OutputItem) -> list[Event]:
        self._item = item
        return item.begin()

    def _end(self, status: str) -> list[Event]:
        if self._item is None:
            return []
        item, self._item = self._item, None
        self._items.append(item.encoded(status))
        return item.end(status)

    def _last(self, status: str) -> list[Event]:
        """End the last item. An answer has at least one item, if only an empty message."""
        events = []
        if self._item is None:
            events = self._begun(MessageOutput(self._id("msg"), 0))
        if isinstance(self._item, MessageOutput) and self._early:
            events += self._say("")
        return [*events, *self._end(status)]

    def _id(self, kind: str) -> str:
        return f"{kind}_{self._request_id}_{len(self._items) + (self._item is not None)}"

    def _ended(self, status: str, report: Report) -> bytes:
        details = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        rest = {"usage": self._usage(report), "pdserve": report_json(report)}
        return self._response(status, incomplete_details=details, **rest)

    def _usage(self, report: Report) -> dict[str, Any]:
        """Return the counts of tokens. The API has no way to say that a number is not known; it is 0 then."""
        return {
            "input_tokens": report.prompt_tokens,
            "input_tokens_details": {"cached_tokens": report.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": report.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning.count},
            "total_tokens": report.prompt_tokens + report.output_tokens,
        }

    def _response(self, status: str, **rest: Any) -> bytes:
        values = {"status": status, "error": None, "incomplete_details": None, "usage": None, **rest}
        return self._head + b',"output":[' + b",".join(self._items) + b"]," + encode_json(values)[1:]

    def _written(self, events: list[Event]) -> bytes:
        """Return events as they are sent, each with its number."""
        first = self._number
        self._number += len(events)
        return b"".join([
            b'event: response.%b\ndata: {"type":"response.%b",%b,"sequence_number":%d}\n\n' % (kind, kind, members, first + i)
            for i, (kind, members) in enumerate(events)
        ])  # fmt: skip


def _status(reason: FinishReason) -> str:
    return INCOMPLETE if reason is FinishReason.LENGTH else COMPLETED
