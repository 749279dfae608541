"""The prompts of a request body: text, token ids, several of either, or chat messages."""

from __future__ import annotations

from typing import Any, Final

from pdserve.core.errors import ContextOverflow
from pdserve.core.limits import MAX_MESSAGES
from router.api.request import ChatMessage, Prompt
from router.openai.body import ContentPart, Message
from router.openai.json import convert, refuse, show
from router.openai.tools import message_calls
from router.openai.unsupported import refuse_unsupported

MAX_PROMPTS: Final = 256  # in one body; each is a request of its own in the router's bounded queue
MAX_PARTS: Final = MAX_MESSAGES  # in one message
ANY_NUMBER: Final = 1 << 31
TOKEN_ID_LIMIT: Final = 1 << 32  # ids travel as uint32; the router checks them against the vocabulary

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI renamed `system` to `developer`, but the models' templates know the old name."""


def read_prompts(value: str | list[Any] | None, max_tokens: int = ANY_NUMBER) -> tuple[Prompt, ...]:
    """Return the prompts, one for each choice of the answer. `prompt` is "text", [ids], ["text", ...] or [[ids], ...].

    A prompt of more than `max_tokens` ids is refused by its count, before the ids are looked at. Raises `InvalidRequest`.
    """
    if value is None:
        raise refuse("prompt", "is missing")
    if isinstance(value, str):
        return (value,)
    if not value:
        raise refuse("prompt", "must not be empty")
    if isinstance(value[0], int):
        return (_prompt_ids(value, "prompt", max_tokens),)
    if len(value) > MAX_PROMPTS:
        raise refuse("prompt", f"holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    if isinstance(value[0], str):
        return convert(value, tuple[str, ...], "prompt")
    lists = convert(value, list[list[Any]], "prompt")
    return tuple(_prompt_ids(ids, f"prompt[{i}]", max_tokens) for i, ids in enumerate(lists))


def _prompt_ids(values: list[Any], field: str, max_tokens: int) -> tuple[int, ...]:
    if not values:
        raise refuse(field, "must hold at least one token id")
    if len(values) > max_tokens:
        raise ContextOverflow.of_prompt(f"{len(values)} tokens", max_tokens + 1, field=field)
    return token_ids(convert(values, tuple[int, ...], field), field)


def token_ids(values: tuple[int, ...], field: str) -> tuple[int, ...]:
    """Return the same ids. Raises `InvalidRequest` unless each fits uint32."""
    if values and (min(values) < 0 or max(values) >= TOKEN_ID_LIMIT):
        i = next(i for i, value in enumerate(values) if not 0 <= value < TOKEN_ID_LIMIT)
        raise refuse(f"{field}[{i}]", f"must be from 0 to {TOKEN_ID_LIMIT - 1}, got {show(values[i])}")
    return values


def read_messages(messages: list[Message] | None) -> tuple[ChatMessage, ...]:
    """Return the messages of `messages`. Raises `InvalidRequest` unless there is at least one, each role is known to templates
    and each content is text."""
    if messages is None:
        raise refuse("messages", "is missing")
    if not messages:
        raise refuse("messages", "must hold at least one message")
    if len(messages) > MAX_MESSAGES:
        raise refuse("messages", f"holds {len(messages)} messages; at most {MAX_MESSAGES} are allowed")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: Message, field: str) -> ChatMessage:
    if message.role not in _ROLES:
        raise refuse(f"{field}.role", f"must be one of {', '.join(_ROLES)}, got {show(message.role)}")
    refuse_unsupported(message, field)
    calls = message_calls(message, field)
    if message.refusal and message.role != "assistant":
        raise refuse(f"{field}.refusal", "is only allowed in a message of the assistant")
    said = message.content
    if said is None and message.role == "assistant":  # an answer of calls alone, or one that was cut before its text
        content = None if calls else ""
    else:
        content = _content(said, f"{field}.content")
    if message.role == "tool" and not message.tool_call_id:
        raise refuse(f"{field}.tool_call_id", "is missing")
    if message.role != "tool" and message.tool_call_id:
        raise refuse(f"{field}.tool_call_id", "is only allowed in a message of the role tool")
    reasoning = message.reasoning_content or message.reasoning or ""
    if reasoning and message.role != "assistant":
        raise refuse(f"{field}.reasoning_content", "is only allowed in a message of the assistant")
    if message.refusal:
        content = message.refusal if not content else f"{content}\n{message.refusal}"
    return ChatMessage(_ROLES[message.role], content, calls, message.tool_call_id or "", message.name or "", reasoning)


def _content(content: str | list[ContentPart] | None, field: str) -> str:
    """Return the text of a message. The texts of a list of parts are joined with line ends, as vLLM does."""
    if content is None:
        raise refuse(field, "is missing")
    if isinstance(content, str):
        return content
    if len(content) > MAX_PARTS:
        raise refuse(field, f"has {len(content)} parts; at most {MAX_PARTS} are allowed")
    return "\n".join(_text(part, f"{field}[{i}]") for i, part in enumerate(content))


def _text(part: ContentPart, field: str) -> str:
    """Return the text of a part. What a model once refused with is text of its answer, as in vLLM."""
    if part.type not in ("text", "refusal"):
        raise refuse(f"{field}.type", f"{show(part.type)} is not supported; only 'text' and 'refusal' are")
    refuse_unsupported(part, field)
    return text_or_refusal(part.type, part.text, part.refusal, field)


def text_or_refusal(kind: str, text: str | None, refusal: str | None, field: str) -> str:
    """Return the one of both that a part of this kind has. Raises `InvalidRequest` if it lacks it, or has the other one."""
    own, other, others_name = (text, refusal, "refusal") if kind == "text" else (refusal, text, "text")
    if own is None:
        raise refuse(f"{field}.{kind}", "is missing")
    if other:
        raise refuse(f"{field}.{others_name}", f"is not allowed in a part with a {kind}")
    return own
