"""The prompts of a request body: text, token ids, several of either, or chat messages."""

from __future__ import annotations

from typing import Any, Final

from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import MAX_MESSAGES
from router.api.request import ChatMessage, Prompt
from router.openai.json import Fields, integer, kind, refuse, section, show, text

MAX_PROMPTS: Final = 256  # in one body; each is a request of its own in the router's bounded queue
MAX_PARTS: Final = MAX_MESSAGES  # in one message
ANY_NUMBER: Final = 1 << 31
TOKEN_ID_LIMIT: Final = 1 << 32  # ids travel as uint32; the router checks them against the vocabulary

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""OpenAI renamed `system` to `developer`, but the models' templates know the old name."""


def read_prompts(fields: Fields, max_tokens: int = ANY_NUMBER) -> tuple[Prompt, ...]:
    """Return the prompts, one for each choice of the answer. `prompt` is "text", [ids], ["text", ...] or [[ids], ...].

    A prompt of more than `max_tokens` ids is refused by its count, before the ids are looked at. Raises `InvalidRequest`.
    """
    value = fields.raw("prompt")
    if value is None:
        raise refuse("prompt", "is missing")
    if isinstance(value, str):
        return (text(value, "prompt"),)
    if not isinstance(value, list):
        raise refuse("prompt", f"must be a string or a list, got {kind(value)}")
    if not value:
        raise refuse("prompt", "must not be empty")
    if not isinstance(value[0], (str, list)):
        return (_token_ids(value, "prompt", max_tokens),)
    if len(value) > MAX_PROMPTS:
        raise refuse("prompt", f"holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    if isinstance(value[0], str):
        return tuple(text(item, f"prompt[{i}]") for i, item in enumerate(value))
    return tuple(_token_ids(item, f"prompt[{i}]", max_tokens) for i, item in enumerate(value))


def _token_ids(value: Any, field: str, max_tokens: int) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise refuse(field, f"must be a list of token ids, got {kind(value)}")
    if not value:
        raise refuse(field, "must hold at least one token id")
    if len(value) > max_tokens:
        raise refuse(field, f"has {len(value)} tokens; at most {max_tokens} fit max_model_len {max_tokens + 1}")
    if not all(type(item) is int for item in value):
        i = next(i for i, item in enumerate(value) if type(item) is not int)
        raise refuse(f"{field}[{i}]", f"must be a token id, got {kind(value[i])}")
    if min(value) < 0 or max(value) >= TOKEN_ID_LIMIT:
        i = next(i for i, item in enumerate(value) if not 0 <= item < TOKEN_ID_LIMIT)
        raise refuse(f"{field}[{i}]", f"must be from 0 to {TOKEN_ID_LIMIT - 1}, got {show(value[i])}")
    return tuple(value)


def read_token_ids(fields: Fields, name: str, max_count: int) -> tuple[int, ...] | None:
    """Return a list of token ids, which may be empty. None: the field is absent. Raises `InvalidRequest`."""
    values = fields.array(name)
    if values is None:
        return None
    if len(values) > max_count:
        raise refuse(name, f"has {len(values)} ids; at most {max_count} are allowed")
    for i, value in enumerate(values):
        number = integer(value, f"{name}[{i}]")
        if not 0 <= number < TOKEN_ID_LIMIT:
            raise refuse(f"{name}[{i}]", f"must be from 0 to {TOKEN_ID_LIMIT - 1}, got {show(number)}")
    return tuple(values)


def read_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    """Return the messages of `messages`. Raises `InvalidRequest` unless there is at least one, each role is known to templates
    and each content is text."""
    values = fields.array("messages")
    if values is None:
        raise refuse("messages", "is missing")
    if not values:
        raise refuse("messages", "must hold at least one message")
    if len(values) > MAX_MESSAGES:
        raise refuse("messages", f"holds {len(values)} messages; at most {MAX_MESSAGES} are allowed")
    return tuple(_message(value, f"messages[{i}]") for i, value in enumerate(values))


def _message(value: Any, field: str) -> ChatMessage:
    fields = section(value, field)
    role = fields.text("role")
    if role not in _ROLES:
        raise refuse(f"{field}.role", f"must be one of {', '.join(_ROLES)}, got {show(role)}")
    for name in ("tool_calls", "function_call", "audio"):
        if fields.raw(name):
            raise refuse(f"{field}.{name}", "is not supported")
    return ChatMessage(_ROLES[role], _content(fields.raw("content"), f"{field}.content"))


def _content(value: Any, field: str) -> str:
    """Return the text of a message. The texts of a list of parts are joined with line ends, as vLLM does."""
    if isinstance(value, list):
        if len(value) > MAX_PARTS:
            raise refuse(field, f"has {len(value)} parts; at most {MAX_PARTS} are allowed")
        return "\n".join(_part(part, f"{field}[{i}]") for i, part in enumerate(value))
    if not isinstance(value, str):
        raise refuse(field, f"must be a string or a list of parts, got {kind(value)}")
    return text(value, field)


def _part(value: Any, field: str) -> str:
    fields = section(value, field)
    part_type = fields.text("type")
    if part_type != "text":
        raise _unsupported_part(field, part_type)
    content = fields.text("text")
    if content is None:
        raise refuse(f"{field}.text", "is missing")
    return content


def _unsupported_part(field: str, part_type: str | None) -> InvalidRequest:
    if part_type is None:
        return refuse(f"{field}.type", "is missing")
    return refuse(f"{field}.type", f"{show(part_type)} is not supported; only 'text' is")
