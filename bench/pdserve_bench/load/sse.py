"""The events of a streamed OpenAI answer, whoever sends them, become the times and tokens of an `LoadAnswer`.

A server says how many tokens a chunk has only where it sends its usage with each chunk (`continuous_usage_stats` of vLLM and of
pdserve). Otherwise a chunk with text counts as one token until the usage at the end gives the sum. Nothing here is kept that
grows with what a hostile server sends.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pdserve_bench.load.failures import BAD_JSON, BROKEN_STREAM, LINE_TOO_LONG, REDIRECTED, TOO_MANY_TOKENS
from pdserve_bench.load.served import served_of_json, served_of_timeline
from pdserve_bench.load.target import LoadAnswer, LoadCall
from pdserve_bench.row import Served

MAX_LINE_BYTES: Final = 1 << 20
MAX_ERROR_BYTES: Final = 64 << 10
"""An answer that is an error is read so far. The rest is dropped."""
MAX_REASON_CHARS: Final = 64
SPARE_CHUNKS: Final = 16
"""Chunks beyond `max_tokens` that a request may have: servers send an empty one first, or repeat the last one."""


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _SseChunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    pdserve: Served | None = None
    error: Any = None


_DECODER: Final = msgspec.json.Decoder(_SseChunk)


class SseReader:
    """Reads one answer. The connection calls it as the answer comes; `failed` then says that the connection is of no use."""

    def __init__(self, call: LoadCall, answer: LoadAnswer) -> None:
        self._answer = answer
        self._max_tokens = call.max_tokens
        self._rest = bytearray()  # the beginning of a line
        self._status = 0
        self._error_body = bytearray()
        self._counted = 0
        self._chunks = 0
        self._finished = False  # a finish reason has come
        self.done = False
        """The answer has come whole. Only the end of the HTTP message may still follow."""

    @property
    def failed(self) -> bool:
        """The answer has failed in a way that ends the connection."""
        return bool(self._answer.error)

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Take the status and the headers, with names in lower case."""
        self._status = status
        if timeline := headers.get(b"pdserve-timeline"):
            self._answer.served = served_of_timeline(timeline)
        if 300 <= status < 400:
            self._answer.error = REDIRECTED

    def body(self, data: bytes, now_s: float) -> None:
        """Take a part of the body, which arrived at `now_s`."""
        if self._status != 200:
            self._error_body += data[: MAX_ERROR_BYTES - len(self._error_body)]
            return
        if b"\n" not in data:
            self._rest += data
        else:
            if self._rest:
                data = bytes(self._rest) + data
            lines = data.split(b"\n")
            self._rest = bytearray(lines.pop())
            for line in lines:
                if len(line) > MAX_LINE_BYTES:
                    self._answer.error = LINE_TOO_LONG
                elif line.startswith(b"data:"):
                    self._event(line[5:].strip(), now_s)
                if self.failed or self.done:
                    return
        if len(self._rest) > MAX_LINE_BYTES:
            self._answer.error = LINE_TOO_LONG

    def end(self, now_s: float) -> None:
        """Note the end of the message or of the connection."""
        answer = self._answer
        if self.done or answer.error:
            return
        answer.ended_s = now_s
        if self._status and self._status != 200:
            answer.error, answer.message = error_reason(self._status, bytes(self._error_body))
        elif self._finished:  # some servers send no [DONE]
            self.done = True
        else:
            answer.error = BROKEN_STREAM

    def _event(self, payload: bytes, now_s: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            self._answer.ended_s = now_s
            return
        try:
            chunk = _DECODER.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._answer.error = BAD_JSON
            return
        answer = self._answer
        if chunk.error is not None:
            answer.error, answer.message = _named(chunk.error) or "error_in_stream", _message(chunk.error)
        text = ""
        for choice in chunk.choices:
            text += choice.text or ""
            if delta := choice.delta:
                text += delta.content or delta.reasoning_content or delta.reasoning or ""
            self._finished = self._finished or choice.finish_reason is not None
        if text:
            answer.texts.append(text)
        self._count(chunk, text, now_s)
        if chunk.pdserve is not None:
            answer.served = served_of_json(chunk.pdserve, answer.served.cached_prompt_tokens)

    def _count(self, chunk: _SseChunk, text: str, now_s: float) -> None:
        """Count the tokens of a chunk, by its usage where it has one, else as one token if it has text."""
        answer, usage = self._answer, chunk.usage
        tokens = 1 if text else 0
        if usage is not None:
            answer.prompt_tokens, answer.output_tokens = max(0, usage.prompt_tokens), max(0, usage.completion_tokens)
            if usage.prompt_tokens_details and usage.prompt_tokens_details.cached_tokens is not None:
                answer.served = Served(cached_prompt_tokens=usage.prompt_tokens_details.cached_tokens)
            if chunk.choices:
                tokens = max(0, usage.completion_tokens - self._counted)
        if tokens:
            self._counted += tokens
            self._chunks += 1
            answer.arrivals.append((now_s, tokens))
        if max(answer.output_tokens or 0, self._counted) > self._max_tokens + SPARE_CHUNKS:
            answer.error = TOO_MANY_TOKENS


def error_reason(status: int, body: bytes) -> tuple[str, str]:
    """Return the reason of an HTTP error, and its message: the code in OpenAI's error object where it is a name, else the
    status; its message, else the whole body."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        told = None
    error = told.get("error") if isinstance(told, dict) else None
    return _named(error) or f"http_{status}", _message(error) or body.decode("utf-8", "replace")


def _message(error: Any) -> str:
    """Return the message in an OpenAI error object. Empty: it has none."""
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def _named(error: Any) -> str:
    """Return the code in an OpenAI error object if it is a short name. Empty: it has none."""
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, str) and len(code) <= MAX_REASON_CHARS and code.replace("_", "").isalnum() and code.isascii():
        return code
    return ""
