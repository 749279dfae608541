"""The items of the input become the messages of a chat.

A call belongs to the message of the assistant before it, reasoning to the item after it. Every other item is a message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec
from msgspec import Raw

from router.openai.body import Message
from router.openai.json import Ignored, decode, decode_body, refuse, refuse_unsupported, show
from router.openai.prompt import MAX_PARTS, text_or_refusal
from router.openai.responses.body import CallItem, CallOutputItem, ItemKind, MessageItem, ReasoningItem, TextPart
from router.openai.responses.names import ResponseNames

_KIND: Final = msgspec.json.Decoder(ItemKind)
_MESSAGE: Final = msgspec.json.Decoder(MessageItem)
_CALL: Final = msgspec.json.Decoder(CallItem)
_CALL_OUTPUT: Final = msgspec.json.Decoder(CallOutputItem)
_REASONING: Final = msgspec.json.Decoder(ReasoningItem)
KINDS: Final = ("message", "function_call", "function_call_output", "reasoning")
_TEXT_TYPES: Final = ("input_text", "output_text", "refusal")
_ASSISTANT: Final = "assistant"


@dataclass(slots=True)
class _Turn:
    """One message of the chat, and the names of the items in the body that it is made of."""

    place: str
    role: str
    content: str | None = None
    reasoning: str = ""
    call_id: str | None = None
    calls: list[dict[str, object]] = field(default_factory=list)
    call_places: list[str] = field(default_factory=list)

    def message(self) -> Message:
        """Return the message."""
        message = Message(self.role, self.content, tool_call_id=self.call_id, reasoning_content=self.reasoning or None)
        if self.calls:
            message.tool_calls = Raw(msgspec.json.encode(self.calls))
        return message


class ResponseTurns:
    """The messages of a chat that is read from a body of `/v1/responses`."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self.left_out: list[Ignored] = []
        """The fields of each item that were left out."""

    @property
    def messages(self) -> list[Message]:
        """The messages."""
        return [turn.message() for turn in self._turns]

    def say(self, role: str, text: str, place: str) -> None:
        """Add a message that is called `place` in the body."""
        self._turns.append(_Turn(place, role, text))

    def add(self, data: bytes, place: str) -> None:
        """Add an item. An item without a type is a message. Raises `InvalidRequest` naming the field."""
        match decode(data, _KIND, place).type or KINDS[0]:
            case "message":
                message, ignored = decode_body(data, _MESSAGE, place)
                hints = refuse_unsupported(message, place)
                self._message(message, place)
            case "function_call":
                call, ignored = decode_body(data, _CALL, place)
                hints = refuse_unsupported(call, place)
                self._call(call, place)
            case "function_call_output":
                output, ignored = decode_body(data, _CALL_OUTPUT, place)
                hints = refuse_unsupported(output, place)
                text = _joined(output.output, f"{place}.output")
                self._turns.append(_Turn(place, "tool", text, call_id=output.call_id))
            case "reasoning":
                reasoning, ignored = decode_body(data, _REASONING, place)
                hints = refuse_unsupported(reasoning, place)
                text = "".join(_reasoning_text(part, f"{place}.content[{i}]") for i, part in enumerate(reasoning.content or ()))
                if text:  # there is none where another server gave it encrypted
                    self._turns.append(_Turn(place, _ASSISTANT, reasoning=text))
            case kind:
                raise refuse(f"{place}.type", f"{show(kind)} is not supported; only {', '.join(KINDS)} are")
        self.left_out += (ignored, hints)

    def names(self, *, formatted: bool) -> ResponseNames:
        """Return the names of the items in the body. `formatted`: the constraint came from `text.format`."""
        calls = tuple(tuple(turn.call_places) for turn in self._turns)
        return ResponseNames(tuple(turn.place for turn in self._turns), calls, formatted)

    def _message(self, item: MessageItem, place: str) -> None:
        content = _joined(item.content, f"{place}.content")
        last = self._turns[-1] if self._turns else None
        if item.role == _ASSISTANT and last and last.role == _ASSISTANT and last.content is None and not last.calls:
            last.content, last.place = content, place  # it had reasoning alone
        else:
            self._turns.append(_Turn(place, item.role, content))

    def _call(self, item: CallItem, place: str) -> None:
        if not self._turns or self._turns[-1].role != _ASSISTANT:
            self._turns.append(_Turn(place, _ASSISTANT))
        turn = self._turns[-1]
        turn.calls.append({
            "id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments},
        })  # fmt: skip
        turn.call_places.append(place)


def _joined(content: str | list[TextPart] | None, place: str) -> str | None:
    """Return the text of a content. The texts of parts are joined as those of a chat are."""
    if not isinstance(content, list):
        return content
    if len(content) > MAX_PARTS:
        raise refuse(place, f"has {len(content)} parts; at most {MAX_PARTS} are allowed")
    return "\n".join(_text(part, f"{place}[{i}]") for i, part in enumerate(content))


def _text(part: TextPart, place: str) -> str:
    if part.type not in _TEXT_TYPES:
        raise refuse(f"{place}.type", f"{show(part.type)} is not supported; only {', '.join(_TEXT_TYPES)} are")
    refuse_unsupported(part, place)
    return text_or_refusal("refusal" if part.type == "refusal" else "text", part.text, part.refusal, place)


def _reasoning_text(part: TextPart, place: str) -> str:
    if part.type != "reasoning_text":
        raise refuse(f"{place}.type", f"{show(part.type)} is not supported; only reasoning_text is")
    refuse_unsupported(part, place)
    if part.text is None:
        raise refuse(f"{place}.text", "is missing")
    return part.text
