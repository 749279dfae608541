"""The items of an answer of `/v1/responses`: messages, reasoning and calls. Each knows the events that build it up."""

from __future__ import annotations

from json.encoder import encode_basestring_ascii
from typing import Any, Final, Protocol

from router.openai.json import encode_json

IN_PROGRESS: Final = "in_progress"
Event = tuple[bytes, bytes]
"""The type of an event without its "response." at the beginning, and the members of its object as JSON."""


class OutputItem(Protocol):
    """One item, which grows until the next one begins."""

    def begin(self) -> list[Event]:
        """Return the events that open the item."""

    def end(self, status: str) -> list[Event]:
        """Return the events that close the item."""

    def encoded(self, status: str) -> bytes:
        """Return the item as JSON."""


class _Parted:
    """An item with one part of text, of which a message and reasoning are made."""

    name = b""
    """The beginning of the types of its events."""

    def __init__(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._index = b'"output_index":%d' % index
        self._place = b'"item_id":%b,%b,"content_index":0' % (encode_json(item_id), self._index)
        self._kind = self.name + b".delta"
        self._head = self._place + b',"delta":'
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []

    def begin(self) -> list[Event]:
        """Implements `OutputItem.begin`."""
        return [
            (b"output_item.added", self._index + b',"item":' + self._item(IN_PROGRESS, b"")),
            (b"content_part.added", self._place + b',"part":' + self._part("", b"")),
        ]

    def end(self, status: str) -> list[Event]:
        """Implements `OutputItem.end`."""
        text, logprobs = self._whole
        return [
            (self.name + b".done", self._place + b',"text":' + encode_json(text) + self._told(logprobs)),
            (b"content_part.done", self._place + b',"part":' + self._part(text, logprobs)),
            (b"output_item.done", self._index + b',"item":' + self.encoded(status)),
        ]

    def encoded(self, status: str) -> bytes:
        """Implements `OutputItem.encoded`."""
        return self._item(status, self._part(*self._whole))

    def delta(self, text: str, logprobs: bytes = b"") -> Event:
        """Add text, with the log-probabilities of its tokens as entries of a JSON list. Return the event."""
        self._texts.append(text)
        if logprobs:
            self._logprobs.append(logprobs)
        return self._kind, self._head + encode_basestring_ascii(text).encode() + self._told(logprobs)

    @property
    def _whole(self) -> tuple[str, bytes]:
        return "".join(self._texts), b",".join(self._logprobs)

    def _told(self, logprobs: bytes) -> bytes:
        """Return the member of an event that has the log-probabilities."""
        return b""

    def _part(self, text: str, logprobs: bytes) -> bytes:
        raise NotImplementedError

    def _item(self, status: str, content: bytes) -> bytes:
        raise NotImplementedError


class MessageOutput(_Parted):
    """A message of the assistant."""

    name = b"output_text"

    def _told(self, logprobs: bytes) -> bytes:
        return b',"logprobs":[' + logprobs + b"]"

    def _part(self, text: str, logprobs: bytes) -> bytes:
        return b'{"type":"output_text","text":%b,"annotations":[],"logprobs":[%b]}' % (encode_json(text), logprobs)

    def _item(self, status: str, content: bytes) -> bytes:
        head = {"id": self._id, "type": "message", "status": status, "role": "assistant"}
        return encode_json(head)[:-1] + b',"content":[' + content + b"]}"


class ReasoningOutput(_Parted):
    """The text that the model wrote to itself."""

    name = b"reasoning_text"

    def _part(self, text: str, logprobs: bytes) -> bytes:
        return b'{"type":"reasoning_text","text":%b}' % encode_json(text)

    def _item(self, status: str, content: bytes) -> bytes:
        head = {"id": self._id, "type": "reasoning", "status": status, "summary": []}
        return encode_json(head)[:-1] + b',"content":[' + content + b"]}"


class CallOutput:
    """A call of a tool."""

    def __init__(self, item_id: str, index: int, call_id: str, name: str) -> None:
        self._fixed = {"id": item_id, "type": "function_call", "call_id": call_id, "name": name}
        self._index: dict[str, Any] = {"output_index": index}
        self._place = {"item_id": item_id, **self._index}
        self._arguments: list[str] = []

    def begin(self) -> list[Event]:
        """Implements `OutputItem.begin`."""
        return [(b"output_item.added", _members({**self._index, "item": self._item(IN_PROGRESS, "")}))]

    def end(self, status: str) -> list[Event]:
        """Implements `OutputItem.end`."""
        arguments = "".join(self._arguments)
        done = {**self._place, "name": self._fixed["name"], "arguments": arguments}
        return [
            (b"function_call_arguments.done", _members(done)),
            (b"output_item.done", _members({**self._index, "item": self._item(status, arguments)})),
        ]

    def encoded(self, status: str) -> bytes:
        """Implements `OutputItem.encoded`."""
        return encode_json(self._item(status, "".join(self._arguments)))

    def delta(self, arguments: str) -> Event:
        """Add a piece of the arguments. Return the event."""
        self._arguments.append(arguments)
        return b"function_call_arguments.delta", _members({**self._place, "delta": arguments})

    def _item(self, status: str, arguments: str) -> dict[str, str]:
        return {**self._fixed, "status": status, "arguments": arguments}


def _members(values: dict[str, Any]) -> bytes:
    return encode_json(values)[1:-1]
