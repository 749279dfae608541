"""The names of fields in a body of `/v1/responses`, for errors of the chat that the body became."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import InvalidRequest
from router.openai.json import renamed

_CALL: Final = re.compile(r"^messages\[([0-9]+)\]\.tool_calls\[([0-9]+)\](\.function)?")
_MESSAGE: Final = re.compile(r"^messages\[([0-9]+)\]")
_CONSTRAINT: Final = re.compile(r"^structured_outputs\b.*")
_FIELDS: Final = (
    (re.compile(r"^messages$"), "input"),
    (re.compile(r"\.tool_call_id$"), ".call_id"),
    (re.compile(r"^max_(completion_)?tokens$"), "max_output_tokens"),
    (re.compile(r"^logprobs$"), "top_logprobs"),
    (re.compile(r"^response_format(\.json_schema)?"), "text.format"),
    (re.compile(r"^(tools\[[0-9]+\]|tool_choice)\.function"), r"\1"),
    (re.compile(r"^(chat_template_kwargs\.)?reasoning_effort$"), "reasoning.effort"),
)


@dataclass(frozen=True, slots=True)
class ResponseNames:
    """The names of the items that became messages and calls."""

    messages: tuple[str, ...]
    calls: tuple[tuple[str, ...], ...]
    """The names of the calls of each message."""
    formatted: bool
    """The constraint on the output came from `text.format`."""

    def renamed(self, error: InvalidRequest) -> InvalidRequest:
        """Return an error of the chat with the name that the field has in the body."""
        written = self.written(error.field)
        return error if written == error.field else renamed(error, written)

    def written(self, field: str) -> str:
        """Return the name in the body of a field of the chat."""
        new = _CALL.sub(lambda found: self.calls[int(found[1])][int(found[2])], field)
        new = _MESSAGE.sub(lambda found: self.messages[int(found[1])], new)
        for chats, own in _FIELDS:
            new = chats.sub(own, new)
        if self.formatted:
            new = _CONSTRAINT.sub("text.format", new)
        return new
