"""Answers in OpenAI's shape: SSE chunks and whole JSON objects.

A streamed token costs one JSON-encoded string. All else in its chunk is the same for the whole request and is encoded once. (To
encode the object anew for each token costs several times as much as to send it.)
"""

from __future__ import annotations

import json
import time
from json.encoder import encode_basestring
from typing import Any, Final

from pdserve.core.sampling import FinishReason
from router.api.answer import Report
from router.api.timeline import report_json
from router.openai.errors import encode_json
from router.openai.request import Call

DONE: Final = b"data: [DONE]\n\n"
_TEXT_MARK: Final = "\x00text\x00"  # stands for the text until the constant parts have been cut out
LOGPROBS_MARK: Final = "\x00logprobs\x00"
_LOGPROBS_PLACE: Final = b'"logprobs":' + encode_json(LOGPROBS_MARK)
_FINISH_MARK: Final = "\x00finish\x00"
_NO_LOGPROBS: Final = b'"logprobs":null'
_FINISH_JSON: Final[dict[FinishReason | None, bytes]] = {
    None: b"null",
    **{reason: json.dumps(reason.value).encode() for reason in FinishReason},
}


def event(payload: Any) -> bytes:
    """Return one SSE event."""
    return b"data: " + encode_json(payload) + b"\n\n"


def usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    """Return OpenAI's usage object."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }


class Envelope:
    """The fields that all objects of one answer share."""

    def __init__(self, call: Call, model: str) -> None:
        self._call = call
        self._id = ("chatcmpl-" if call.chat else "cmpl-") + call.request_id
        self._created = int(time.time())
        self._model = model

    def wrap(self, object_type: str, **rest: Any) -> dict[str, Any]:
        """Return an object of the answer: the shared fields and `rest`."""
        return {"id": self._id, "object": object_type, "created": self._created, "model": self._model, **rest}

    @property
    def chunk_type(self) -> str:
        """The `object` field of a stream chunk."""
        return "chat.completion.chunk" if self._call.chat else "text_completion"

    @property
    def whole_type(self) -> str:
        """The `object` field of an answer that is not streamed."""
        return "chat.completion" if self._call.chat else "text_completion"

    def choice(self, index: int, text: str, finish_reason: FinishReason, logprobs: str) -> dict[str, Any]:
        """Return one choice of an answer that is not streamed. `logprobs` is a mark that `with_logprobs` replaces."""
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._call.chat else {"text": text}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason.value}

    def usage_chunk(self, totals: dict[str, int], reports: list[Report]) -> bytes:
        """Return the chunk that follows the last one of every choice. It has no choices, but the usage of all and the report of
        each."""
        return event(self.wrap(self.chunk_type, choices=[], usage=totals, **extension(reports)))


def with_logprobs(body: bytes, logprobs: list[bytes]) -> bytes:
    """Return the encoded answer with each mark replaced by the JSON of its choice, in order. No text of a model can hold the
    name of a mark, because quotes in a string are escaped."""
    parts = body.split(_LOGPROBS_PLACE)
    assert len(parts) == len(logprobs) + 1
    joined = [parts[0]]
    for told, part in zip(logprobs, parts[1:], strict=True):
        joined += (b'"logprobs":', told, part)
    return b"".join(joined)


def extension(reports: list[Report]) -> dict[str, Any]:
    """Return pdserve's own field of an answer: the report of the one request, or those of several prompts in the order of
    choices."""
    if len(reports) == 1:
        return {"pdserve": report_json(reports[0])}
    return {"pdserve": {"requests": [report_json(report) for report in reports]}}


class ChunkFormat:
    """The chunks of one choice: head | text | middle | finish reason | tail [usage]."""

    def __init__(self, envelope: Envelope, call: Call, index: int) -> None:
        delta: dict[str, Any] = {"delta": {"content": _TEXT_MARK}} if call.chat else {"text": _TEXT_MARK}
        choice = {"index": index, **delta, "logprobs": None, "finish_reason": _FINISH_MARK}
        chunk = event(envelope.wrap(envelope.chunk_type, choices=[choice]))
        head, _, rest = chunk.partition(encode_json(_TEXT_MARK))
        middle, _, tail = rest.partition(encode_json(_FINISH_MARK))
        if call.include_usage and not call.continuous_usage:
            tail = tail.replace(b"}\n\n", b',"usage":null}\n\n')  # as OpenAI does: null in all chunks but the last
        self.continuous_usage = call.continuous_usage
        self._usage_follows = call.include_usage
        self.role = self._role_chunk(envelope, call, index)
        self._head: bytes = head
        self._middle: bytes = middle
        self._tail: bytes = tail
        self._running: bytes = middle + _FINISH_JSON[None] + tail

    def _role_chunk(self, envelope: Envelope, call: Call, index: int) -> bytes:
        """Return the chunk with the role that opens a chat stream. A completion has none."""
        if not call.chat:
            return b""
        choice = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        rest = {"usage": None} if call.include_usage else {}
        return event(envelope.wrap(envelope.chunk_type, choices=[choice], **rest))

    def chunk(self, text: str, finish_reason: FinishReason | None, logprobs: dict[str, Any] | None = None) -> bytes:
        """Return the chunk of one delta, with log-probabilities if they are given."""
        encoded = self._head + encode_basestring(text).encode()
        if logprobs is not None:
            middle = self._middle.replace(_NO_LOGPROBS, b'"logprobs":' + encode_json(logprobs))
            return encoded + middle + _FINISH_JSON[finish_reason] + self._tail
        if finish_reason is None:
            return encoded + self._running
        return encoded + self._middle + _FINISH_JSON[finish_reason] + self._tail

    def last_chunk(self, chunk: bytes, report: Report) -> bytes:
        """Return the choice's last chunk with the report added, unless a chunk with the usage of all choices still follows."""
        if self._usage_follows:
            return chunk
        return chunk[: -len(b"}\n\n")] + b',"pdserve":' + encode_json(report_json(report)) + b"}\n\n"

    def with_usage(self, chunk: bytes, totals: dict[str, int]) -> bytes:
        """Return the chunk with the usage so far added."""
        return chunk[: -len(b"}\n\n")] + b',"usage":' + encode_json(totals) + b"}\n\n"
