"""Calls and reasoning in OpenAI's shape. Answers without them never come here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from router.api.answer import CallDelta, Delta
from router.openai.chunks import ChunkFormat
from router.openai.errors import encode_json

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
