"""A chat in plain words, for a template that shows no tools or no calls. Pure.

The grammar of required calls works for every model. With these words the model also knows what it may call, and what has come
of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from router.api.request import ChatMessage

_BEFORE: Final = "You may call functions. Each line describes one, with the JSON schema of its parameters:"
_AFTER: Final = 'Calls are written as a JSON list: [{"name": ..., "parameters": {...}}]'


def with_tools_told(messages: Sequence[ChatMessage], functions: Sequence[dict[str, Any]], role: str) -> tuple[ChatMessage, ...]:
    """Return the messages with a description of the functions at the beginning of the first one of the role, which is made if
    the chat has none."""
    text = "\n".join([_BEFORE, *(json.dumps(function, ensure_ascii=False) for function in functions), _AFTER])
    place = next((i for i, message in enumerate(messages) if message.role == role), None)
    if place is None:
        return (ChatMessage(role, text), *messages)
    found = messages[place]
    told = replace(found, content=f"{text}\n\n{found.content or ''}")
    return (*messages[:place], told, *messages[place + 1 :])


def with_calls_told(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
    """Return the messages with calls in the text of the assistant, and their results as messages of the user."""
    names = {call.id: call.name for message in messages for call in message.calls}
    return tuple(_told(message, names) for message in messages)


def _told(message: ChatMessage, names: dict[str, str]) -> ChatMessage:
    if message.role == "tool":
        called = names.get(message.call_id, "a function")
        return ChatMessage("user", f"Result of {called}: {message.content or ''}")
    if not message.calls:
        return message
    calls = ", ".join(f'{{"name": {json.dumps(call.name)}, "parameters": {call.arguments}}}' for call in message.calls)
    said = f"{message.content}\n" if message.content else ""
    return replace(message, content=f"{said}[{calls}]", calls=())
