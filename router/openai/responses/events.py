"""The answer of `/v1/responses`: one object, or events that build it up.

A streamed token costs one JSON-encoded string, as in a chat. The objects that open and close a stream are written once each.
"""

from __future__ import annotations

import time
from json.encoder import encode_basestring_ascii
from typing import Any, Final

from pdserve.core.errors import PdserveError
from pdserve.core.sampling import FinishReason
from router.api.answer import Report
from router.api.timeline import report_json
from router.openai.errors import encode_json, error_payload
from router.openai.responses.request import ResponsesCall

COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
FAILED: Final = "failed"
IN_PROGRESS: Final = "in_progress"
_STATELESS: Final[dict[str, Any]] = {
    "background": False,
    "max_tool_calls": None,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "service_tier": "default",
    "store": False,
    "truncation": "disabled",
}
"""The fields of every answer whose other values are refused in requests."""


class ResponseWriter:
    """Writes one answer. It numbers the events, and knows no text: its owner collects that."""

    def __init__(self, asked: ResponsesCall, model: str) -> None:
        own = {"id": f"resp_{asked.request_id}", "object": "response", "created_at": int(time.time()), "model": model}
        self._head = encode_json({**own, **_STATELESS})[:-1] + b"," + asked.repeated
        self._item_id = f"msg_{asked.request_id}"
        self._place = b'"item_id":%b,"output_index":0,"content_index":0' % encode_json(self._item_id)
        self._delta = b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta",%b,"delta":' % self._place
        self._number = 0

    def opening(self) -> bytes:
        """Return the events before the first token."""
        response = b'"response":' + self._response(IN_PROGRESS, b"")
        item = b'"output_index":0,"item":' + self._item(IN_PROGRESS, b"")
        part = self._place + b',"part":' + _part("", b"[]")
        return b"".join((
            self._event("response.created", response),
            self._event("response.in_progress", response),
            self._event("response.output_item.added", item),
            self._event("response.content_part.added", part),
        ))  # fmt: skip

    def delta(self, text: str, logprobs: bytes) -> bytes:
        """Return the event of more text, with the log-probabilities of its tokens as a JSON list."""
        number = self._next()
        encoded = encode_basestring_ascii(text).encode()
        return b'%b%b,"logprobs":%b,"sequence_number":%d}\n\n' % (self._delta, encoded, logprobs, number)

    def closing(self, text: str, logprobs: bytes, reason: FinishReason, report: Report) -> bytes:
        """Return the events after the last token."""
        status = _status(reason)
        part = _part(text, logprobs)
        item = self._item(status, part)
        told = b'"text":%b,"logprobs":%b' % (encode_json(text), logprobs)
        return b"".join((
            self._event("response.output_text.done", self._place + b"," + told),
            self._event("response.content_part.done", self._place + b',"part":' + part),
            self._event("response.output_item.done", b'"output_index":0,"item":' + item),
            self._event(f"response.{status}", b'"response":' + self._ended(status, item, report)),
        ))  # fmt: skip

    def failed(self, error: PdserveError, report: Report | None) -> bytes:
        """Return the last event of a stream that an error ends."""
        told = error_payload(error)["error"]
        rest = {} if report is None else {"pdserve": report_json(report)}
        failure = {"code": told["code"], "message": told["message"]}
        return self._event("response.failed", b'"response":' + self._response(FAILED, b"", error=failure, **rest))

    def whole(self, text: str, logprobs: bytes, reason: FinishReason, report: Report) -> bytes:
        """Return the answer that is not streamed."""
        status = _status(reason)
        return self._ended(status, self._item(status, _part(text, logprobs)), report)

    def _ended(self, status: str, item: bytes, report: Report) -> bytes:
        details = {"reason": "max_output_tokens"} if status == INCOMPLETE else None
        rest = {"usage": _usage(report), "pdserve": report_json(report)}
        return self._response(status, item, incomplete_details=details, **rest)

    def _response(self, status: str, output: bytes, **rest: Any) -> bytes:
        values = {"status": status, "error": None, "incomplete_details": None, "usage": None, **rest}
        return self._head + b',"output":[' + output + b"]," + encode_json(values)[1:]

    def _item(self, status: str, content: bytes) -> bytes:
        head = {"id": self._item_id, "type": "message", "status": status, "role": "assistant"}
        return encode_json(head)[:-1] + b',"content":[' + content + b"]}"

    def _event(self, kind: str, members: bytes) -> bytes:
        name = kind.encode()
        return b'event: %b\ndata: {"type":"%b",%b,"sequence_number":%d}\n\n' % (name, name, members, self._next())

    def _next(self) -> int:
        self._number += 1
        return self._number - 1


def _status(reason: FinishReason) -> str:
    return INCOMPLETE if reason is FinishReason.LENGTH else COMPLETED


def _part(text: str, logprobs: bytes) -> bytes:
    return b'{"type":"output_text","text":%b,"annotations":[],"logprobs":%b}' % (encode_json(text), logprobs)


def _usage(report: Report) -> dict[str, Any]:
    """Return the counts of tokens. Workers do not say how many tokens of one prompt they had cached, so none are claimed."""
    return {
        "input_tokens": report.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": report.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": report.prompt_tokens + report.output_tokens,
    }
