"""Answers in OpenAI's shape: SSE chunks and whole JSON objects.

A streamed token costs one JSON-encoded string. All else in its chunk is the same for the whole request, and all but two values
are the same for every request of its kind, so they are encoded once. (To encode the object anew for each token costs several
times as much as to send it.) Calls and reasoning are rare and have functions of their own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any, Final, NamedTuple

from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason
from pdserve.core.speculation import DraftCounts
from router.api.answer import CallDelta, Delta, report_json, timeline
from router.openai.json import encode_json
from router.openai.request import Call

StopReason = int | str | None
"""What stopped an output, as `Delta.stop_reason` tells it."""
DONE: Final = b"data: [DONE]\n\n"
_TEXT_MARK: Final = "\x00text\x00"  # stands for the text until the constant parts have been cut out
_ID_MARK: Final = "\x00id\x00"
_CREATED_MARK: Final = "\x00created\x00"
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


def usage(
    prompt_tokens: int,
    output_tokens: int,
    cached_tokens: int | None = None,
    reasoning_tokens: int | None = None,
    speculation: DraftCounts | None = None,
) -> dict[str, Any]:
    """Return OpenAI's usage object. `cached_tokens`: the prompt tokens that were not computed. None: they are not known.
    `reasoning_tokens`: those of a chat. None: it is no chat, or not its end. `speculation`: the drafts of all choices, of
    which the output tokens do not count the wrong ones. None: there were none."""
    totals: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }
    if cached_tokens is not None:
        totals["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    details = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
    if speculation is not None:
        details["accepted_prediction_tokens"] = speculation.num_accepted_tokens
        details["rejected_prediction_tokens"] = speculation.num_draft_tokens - speculation.num_accepted_tokens
    if details:
        totals["completion_tokens_details"] = details
    return totals


class Envelope:
    """The fields that all objects of one answer share."""

    def __init__(self, call: Call, model: str) -> None:
        self._call = call
        self.id = ("chatcmpl-" if call.chat else "cmpl-") + call.request_id
        self.created = int(time.time())
        self.model = model

    def wrap(self, object_type: str, **rest: Any) -> dict[str, Any]:
        """Return an object of the answer: the shared fields and `rest`."""
        return {"id": self.id, "object": object_type, "created": self.created, "model": self.model, **rest}

    @property
    def chunk_type(self) -> str:
        """The `object` field of a stream chunk."""
        return _chunk_type(chat=self._call.chat)

    @property
    def whole_type(self) -> str:
        """The `object` field of an answer that is not streamed."""
        return "chat.completion" if self._call.chat else "text_completion"

    def choice(
        self, index: int, text: str, finish_reason: FinishReason, logprobs: str, stop_reason: StopReason = None
    ) -> dict[str, Any]:
        """Return one choice of an answer that is not streamed. `logprobs` is a mark that `with_logprobs` replaces."""
        content = {"message": {"role": "assistant", "content": text, "refusal": None}} if self._call.chat else {"text": text}
        reasons = {"finish_reason": finish_reason.value, "stop_reason": stop_reason}
        return {"index": index, **content, "logprobs": logprobs, **reasons}

    def usage_chunk(self, totals: dict[str, Any], reports: list[Report]) -> bytes:
        """Return the chunk that follows the last one of every choice. It has no choices, but the usage of all and the report of
        each."""
        return event(self.wrap(self.chunk_type, choices=[], usage=totals, **extension(reports)))


def with_logprobs(body: bytes, logprobs: list[bytes]) -> list[bytes]:
    """Return the parts of the encoded answer with each mark replaced by the JSON of its choice, in order. No text of a model
    can hold the name of a mark, because quotes in a string are escaped."""
    parts = body.split(_LOGPROBS_PLACE)
    assert len(parts) == len(logprobs) + 1
    joined = [parts[0]]
    for told, part in zip(logprobs, parts[1:], strict=True):
        joined += (b'"logprobs":', told, part)
    return joined


def add_ids(
    choices: Sequence[dict[str, Any]], outputs: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], *, chat: bool
) -> dict[str, Any]:
    """Add to each choice the ids of its tokens, and those of its prompt to a choice of a completion. Return what stands beside
    the choices: the prompt of a chat, as in vLLM."""
    for choice, ids, prompt in zip(choices, outputs, prompts, strict=True):
        choice["token_ids"] = list(ids)
        if not chat:
            choice["prompt_token_ids"] = list(prompt)
    return {"prompt_token_ids": list(prompts[0])} if chat else {}


def extension(reports: list[Report]) -> dict[str, Any]:
    """Return pdserve's own field of an answer: the report of the one request, or those of several prompts in the order of
    choices."""
    if len(reports) == 1:
        return {"pdserve": report_json(reports[0])}
    return {"pdserve": {"requests": [report_json(report) for report in reports]}}


def _chunk_type(*, chat: bool) -> str:
    return "chat.completion.chunk" if chat else "text_completion"


class _Parts(NamedTuple):
    """The constant parts of chunks: before_id | id | before_created | created | before_text | text | middle | finish reason |
    tail. A chat stream opens with before_id | id | before_created | created | role."""

    before_id: bytes
    before_created: bytes
    before_text: bytes
    middle: bytes
    tail: bytes
    role: bytes


@lru_cache(maxsize=1024)
def _parts(chat: bool, index: int, include_usage: bool, continuous_usage: bool, model: str) -> _Parts:
    """Return the constant parts of the chunks of choice `index`."""

    def event_of(choice: dict[str, Any], **rest: Any) -> bytes:
        shared = {"id": _ID_MARK, "object": _chunk_type(chat=chat), "created": _CREATED_MARK, "model": model}
        return event({**shared, "choices": [choice], **rest})

    text: dict[str, Any] = {"delta": {"content": _TEXT_MARK}} if chat else {"text": _TEXT_MARK}
    chunk = event_of({"index": index, **text, "logprobs": None, "finish_reason": _FINISH_MARK})
    before_id, rest = _cut(chunk, _ID_MARK)
    before_created, rest = _cut(rest, _CREATED_MARK)
    before_text, rest = _cut(rest, _TEXT_MARK)
    middle, tail = _cut(rest, _FINISH_MARK)
    if include_usage and not continuous_usage:
        tail = tail.replace(b"}\n\n", b',"usage":null}\n\n')  # as OpenAI does: null in all chunks but the last
    opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    role = event_of(opening, **({"usage": None} if include_usage else {}))
    return _Parts(before_id, before_created, before_text, middle, tail, _cut(role, _CREATED_MARK)[1])


def _cut(data: bytes, mark: str) -> tuple[bytes, bytes]:
    before, _, after = data.partition(encode_json(mark))
    return before, after


class ChunkFormat:
    """The chunks of one choice: head | text | middle | finish reason | tail [usage]."""

    def __init__(self, envelope: Envelope, call: Call, index: int) -> None:
        parts = _parts(call.chat, index, call.include_usage, call.continuous_usage, envelope.model)
        begin = b"%b%b%b%d" % (parts.before_id, encode_basestring(envelope.id).encode(), parts.before_created, envelope.created)
        self.continuous_usage = call.continuous_usage
        self._usage_follows = call.include_usage
        self.role: bytes = begin + parts.role if call.chat else b""
        """The chunk with the role, which opens a chat stream. A completion has none."""
        self._head: bytes = begin + parts.before_text
        self._middle: bytes = parts.middle
        self._tail: bytes = parts.tail
        self._running: bytes = parts.middle + _FINISH_JSON[None] + parts.tail

    def chunk(
        self,
        text: str,
        finish_reason: FinishReason | None,
        logprobs: dict[str, Any] | None = None,
        stop_reason: StopReason = None,
    ) -> bytes:
        """Return the chunk of one delta, with log-probabilities if they are given. The last one tells the stop reason."""
        encoded = self._head + encode_basestring(text).encode()
        if logprobs is None and finish_reason is None:
            return encoded + self._running
        middle = self._middle
        if logprobs is not None:
            middle = middle.replace(_NO_LOGPROBS, b'"logprobs":' + encode_json(logprobs))
        stopped = b"" if finish_reason is None else b',"stop_reason":' + encode_json(stop_reason)
        return encoded + middle + _FINISH_JSON[finish_reason] + stopped + self._tail

    def last_chunk(self, chunk: bytes, report: Report) -> bytes:
        """Return the choice's last chunk with the report added, unless a chunk with the usage of all choices still follows."""
        if self._usage_follows:
            return chunk
        return chunk[: -len(b"}\n\n")] + b',"pdserve":' + timeline(report) + b"}\n\n"

    def opening(self, prompt_ids: Sequence[int] | None) -> bytes:
        """Return the chunk that opens a chat's stream, with the ids of the prompt if they are given. A completion has none."""
        if prompt_ids is None or not self.role:
            return self.role
        return self.role[: -len(b"}\n\n")] + b',"prompt_token_ids":' + encode_json(list(prompt_ids)) + b"}\n\n"

    def with_ids(self, chunk: bytes, ids: Sequence[int], prompt_ids: Sequence[int] | None) -> bytes:
        """Return the chunk with the ids of its tokens in the choice. `prompt_ids` stand in the first chunk of a completion, and
        in the opening of a chat, as in vLLM. None: this is not the first chunk."""
        assert chunk.endswith(self._tail)
        told = b',"token_ids":' + encode_json(list(ids))
        if prompt_ids is not None and not self.role:
            told += b',"prompt_token_ids":' + encode_json(list(prompt_ids))
        return chunk[: -len(self._tail)] + told + self._tail

    def with_usage(self, chunk: bytes, totals: dict[str, Any]) -> bytes:
        """Return the chunk with the usage so far added."""
        return chunk[: -len(b"}\n\n")] + b',"usage":' + encode_json(totals) + b"}\n\n"


_EMPTY: Final = b'"delta":{"content":""}'


def tool_chunk(format_: ChunkFormat, delta: Delta, logprobs: dict[str, Any] | None) -> bytes:
    """Return the chunk of a delta that has calls or reasoning. It has both names of reasoning: `reasoning_content`, and vLLM's
    newer `reasoning`."""
    told: dict[str, Any] = {}
    if delta.text:
        told["content"] = delta.text
    if delta.reasoning:
        told |= {"reasoning_content": delta.reasoning, "reasoning": delta.reasoning}
    if delta.calls:
        told["tool_calls"] = [_piece(call) for call in delta.calls]
    chunk = format_.chunk("", delta.finish_reason, logprobs, delta.stop_reason)
    return chunk.replace(_EMPTY, b'"delta":' + encode_json(told), 1)


def _piece(call: CallDelta) -> dict[str, Any]:
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {
        "index": call.index,
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


class ReasoningTokens:
    """Counts the tokens with which reasoning came, the opening mark among them. Tokens that came together with text or calls
    are not told apart: each kind has the share of its length."""

    def __init__(self) -> None:
        self.count = 0
        self._waiting = 0
        """Tokens that nothing came with yet. They belong to what comes next."""

    def add(self, delta: Delta) -> None:
        """Count the tokens of the next delta."""
        if delta.text and not delta.reasoning and not self._waiting:
            return  # nearly every delta: its tokens are those of the text
        tokens, self._waiting = self._waiting + len(delta.ids), 0
        written = len(delta.text) + sum([len(call.arguments) for call in delta.calls])
        if delta.reasoning:
            self.count += max(1, round(tokens * len(delta.reasoning) / (len(delta.reasoning) + written)))
        elif not written and not delta.calls:
            self._waiting = tokens


class GatheredCall:
    """The calls and the reasoning of an answer that is not streamed."""

    def __init__(self) -> None:
        self.reasoning = ReasoningTokens()
        self._reasoning: list[str] = []
        self._calls: list[CallDelta] = []
        self._arguments: list[list[str]] = []

    def add(self, delta: Delta) -> None:
        """Add those of the next delta."""
        self.reasoning.add(delta)
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
        for call in delta.calls:
            if call.id:
                self._calls.append(call)
                self._arguments.append([])
            self._arguments[call.index].append(call.arguments)

    def into(self, choice: dict[str, Any]) -> dict[str, Any]:
        """Return the choice with calls and reasoning in its message, whose content is null if it is empty beside them."""
        if not self._calls and not self._reasoning:
            return choice
        message = {**choice["message"]}
        message["content"] = message["content"] or None
        if self._reasoning:
            told = "".join(self._reasoning)
            message |= {"reasoning_content": told, "reasoning": told}
        if self._calls:
            message["tool_calls"] = list(self._written())
        return {**choice, "message": message}

    def _written(self) -> Iterable[dict[str, Any]]:
        for call, arguments in zip(self._calls, self._arguments, strict=True):
            yield {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(arguments)}}
