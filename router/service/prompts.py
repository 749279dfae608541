"""Prompts as clients write them become token ids. Long prompts are encoded in a thread.

What a client wrote in a chat becomes the variables of the chat template, as in transformers and vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import msgspec

from pdserve.core.errors import ContextOverflow, InvalidRequest
from pdserve.text.chat import ChatTemplate
from pdserve.text.plain_json import obstacle
from router.api.request import ChatMessage, ChatPrompt, DetokenizeInput, Prompt, Tool
from router.core.turns import Path
from router.service.loop_time import SerialThread
from router.service.model import LengthLimit, ServedModel

INLINE_CHARS: Final = 4096
"""Prompts up to this length are encoded on the loop: about 1 ms, at 0.3 s a megabyte. Longer ones would delay everybody's
tokens."""
PART_CHARS: Final = 32
"""To render a message, a call or a tool takes about as long as to encode so many characters: 7 to 20 us, even an empty one."""
INLINE_IDS: Final = 4096
"""So many ids are decoded on the loop: about 1 ms."""
MAX_CHARS_PER_TOKEN: Final = 256
"""A text longer than this times max_model_len is refused unread. No vocabulary has longer words worth the time."""
MAX_WAITING: Final = 64
"""At most this many long prompts wait for the thread: 64 of a megabyte take 20 s."""


class PromptEncoder:
    """Encodes prompts of clients. It owns its thread; `close` it."""

    def __init__(self, model: ServedModel, limit: LengthLimit) -> None:
        self._model = model
        self._limit = limit
        self._thread = SerialThread("tokenize", MAX_WAITING)

    def close(self) -> None:
        """Stop the thread without waiting. Callers of `encode` that still wait for it get `Unavailable`."""
        self._thread.close()

    async def encode(
        self, prompt: Prompt, client: Path = (), *, add_special_tokens: bool = True, must_fit: bool = False
    ) -> tuple[int, ...]:
        """Return the ids of a prompt: at least one, each in range. The caller checks the length of encoded text. With
        `must_fit`, a text that cannot fit is refused before it is encoded. Raises `InvalidRequest` naming `prompt` or
        `messages`, and `Overloaded` when too many long prompts of this client wait."""
        limit = self._limit.max_model_len
        if isinstance(prompt, str):
            return await self._text(prompt, "prompt", client, limit, special_tokens=add_special_tokens, must_fit=must_fit)
        if isinstance(prompt, ChatPrompt):
            return await self._chat(prompt, client, limit, must_fit=must_fit)
        if prompt and isinstance(prompt[0], ChatMessage):
            return await self._chat(ChatPrompt(prompt), client, limit, must_fit=must_fit)
        if len(prompt) >= limit:  # comes before the ids are walked: a body has room for millions
            raise ContextOverflow.of_prompt(f"{len(prompt)} tokens", limit, field="prompt")
        return self._ids(cast(tuple[int, ...], prompt))

    async def decode(self, asked: DetokenizeInput) -> str:
        """Return the text of ids. Raises `InvalidRequest` naming the first id that is not in the vocabulary, or the number of
        ids if there are more than a request can have, and `Overloaded`."""
        ids, limit, vocab_size = asked.ids, self._limit.max_model_len, self._model.card.vocab_size
        if len(ids) > limit:
            raise InvalidRequest(f"has {len(ids)} ids; at most max_model_len {limit} are allowed", field=asked.field)
        wrong = next((i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"token id {ids[wrong]} is not in [0, {vocab_size - 1}]", field=f"{asked.field}[{wrong}]")
        decode = self._model.tokenizer.decode
        if len(ids) <= INLINE_IDS:
            return decode(ids, skip_special_tokens=asked.skip_special_tokens)
        return await self._thread.run(
            lambda: decode(ids, skip_special_tokens=asked.skip_special_tokens), asked.client, len(ids)
        )

    def _ids(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        if not ids:
            raise InvalidRequest("is empty", field="prompt")
        vocab_size = self._model.card.vocab_size
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"token id {wrong} is not in [0, {vocab_size - 1}]", field="prompt")
        return ids

    async def _chat(self, chat: ChatPrompt, client: Path, limit: int, *, must_fit: bool) -> tuple[int, ...]:
        template = self._model.tokenizer.chat_template
        if template is None:
            raise InvalidRequest(f"model {self._model.name} has no chat template: send a text prompt", field="messages")
        chars = chat_chars(chat)
        _check_chars(chars, "messages", limit)
        size = chars + PART_CHARS * chat_parts(chat)
        if size <= INLINE_CHARS:
            text = chat_text(template, chat)
        else:
            text = await self._thread.run(lambda: chat_text(template, chat), client, size)
        return await self._text(text, "messages", client, limit, special_tokens=False, must_fit=must_fit)

    async def _text(
        self, text: str, field: str, client: Path, limit: int, *, special_tokens: bool, must_fit: bool
    ) -> tuple[int, ...]:
        if not text:
            raise InvalidRequest("is empty", field=field)
        _check_chars(len(text), field, limit)
        if must_fit and len(text) >= limit and (least := self._model.tokenizer.least_tokens(text)) >= limit:
            raise ContextOverflow.of_prompt(f"at least {least} tokens", limit, field=field)
        encode = self._model.tokenizer.encode
        if len(text) <= INLINE_CHARS:
            ids = encode(text, add_special_tokens=special_tokens)
        else:
            ids = await self._thread.run(lambda: encode(text, add_special_tokens=special_tokens), client, len(text))
        if not ids:
            raise InvalidRequest("has no tokens", field=field)
        return tuple(ids)


def _check_chars(count: int, field: str, limit: int) -> None:
    if count > limit * MAX_CHARS_PER_TOKEN:
        raise ContextOverflow.of_prompt(f"more than {limit} tokens, since it has {count} characters", limit, field=field)


_END: Final = "THE_FINAL_MESSAGE_ENDS_HERE "
"""It marks the end of a message that the model goes on with. A template that trims messages takes the blank behind it away, and
then would have taken the blanks before it as well."""
_ARGUMENTS: Final = msgspec.json.Decoder(dict[str, Any])
_BEFORE: Final = "You may call functions. Each line describes one, with the JSON schema of its parameters:"
_AFTER: Final = 'Calls are written as a JSON list: [{"name": ..., "parameters": {...}}]'


def chat_chars(chat: ChatPrompt) -> int:
    """Return the number of characters that a client wrote, about."""
    messages = sum(len(m.content or "") + len(m.reasoning) + len(m.name) + len(m.call_id) for m in chat.messages)
    calls = sum(len(call.arguments) + len(call.name) + len(call.id) for m in chat.messages for call in m.calls)
    return messages + calls + sum(len(tool.parameters) + len(tool.description) for tool in chat.tools) + len(chat.variables)


def chat_parts(chat: ChatPrompt) -> int:
    """Return the number of messages, calls and tools. Each takes time to render, even if it is empty."""
    return len(chat.messages) + sum(len(m.calls) for m in chat.messages) + len(chat.tools)


def chat_text(template: ChatTemplate, chat: ChatPrompt) -> str:
    """Render a chat. Raises `InvalidRequest` naming the field.

    Arguments that are no JSON object, since an answer was cut off in them, are shown as the text that they are. A template that
    cannot show a text there, because it asks for the names of the arguments, gets an object with the text in it. What a
    template does not show of tools and calls is told in plain words.
    """
    refused: InvalidRequest | None = None
    for shown, arguments in _versions(template, chat):
        try:
            return _rendered(template, shown, arguments)
        except InvalidRequest as exc:
            if exc.field != "messages":
                raise
            refused = refused or exc
    assert refused is not None
    raise refused


def _versions(template: ChatTemplate, chat: ChatPrompt) -> Iterator[tuple[ChatPrompt, list[list[Any]]]]:
    """Yield the chat, and the arguments of the calls of each message, in the ways in which a template may take them."""
    if not template.renders_calls:
        chat = replace(chat, messages=_with_calls_told(chat.messages))
    chats = [chat]
    if chat.tools and not template.shows_tools:
        functions = [_tool(tool)["function"] for tool in chat.tools]
        told = (_with_tools_told(chat.messages, functions, role) for role in ("system", "user"))  # some know no system
        chats = [replace(chat, tools=(), messages=messages) for messages in told]
    for one in chats:
        arguments = [[_arguments(call.arguments) for call in message.calls] for message in one.messages]
        yield one, arguments
        named = [[{"arguments": text} if isinstance(text, str) else text for text in calls] for calls in arguments]
        if named != arguments:
            yield one, named


def _with_tools_told(
    messages: Sequence[ChatMessage], functions: Sequence[dict[str, Any]], role: str
) -> tuple[ChatMessage, ...]:
    """Return the messages with a description of the functions at the beginning of the first one of the role, which is made if
    the chat has none."""
    text = "\n".join([_BEFORE, *(json.dumps(function, ensure_ascii=False) for function in functions), _AFTER])
    place = next((i for i, message in enumerate(messages) if message.role == role), None)
    if place is None:
        return (ChatMessage(role, text), *messages)
    found = messages[place]
    told = replace(found, content=f"{text}\n\n{found.content or ''}")
    return (*messages[:place], told, *messages[place + 1 :])


def _with_calls_told(messages: Sequence[ChatMessage]) -> tuple[ChatMessage, ...]:
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


def _rendered(template: ChatTemplate, chat: ChatPrompt, arguments: Sequence[Sequence[Any]]) -> str:
    """Render a chat with the arguments of the calls of each message."""
    messages = [_message(message, called) for message, called in zip(chat.messages, arguments, strict=True)]
    final = messages[-1]["content"]
    if chat.continue_final_message:
        if final is None:
            raise InvalidRequest("needs a final message with a text to go on with", field="continue_final_message")
        messages[-1]["content"] = final + _END
    text = template.render_chat(
        messages,
        [_tool(tool) for tool in chat.tools],
        json.loads(chat.variables) if chat.variables else {},
        add_generation_prompt=chat.add_generation_prompt,
    )
    return _cut_after(text, final) if chat.continue_final_message else text


def _arguments(text: str) -> dict[str, Any] | str:
    """Return the JSON object in the text, or else the text: if it is no object, or one that not every reader of JSON takes."""
    try:
        values: dict[str, Any] = _ARGUMENTS.decode(text)
    except (ValueError, RecursionError):
        return text
    return text if obstacle(values) else values


def _cut_after(text: str, content: str) -> str:
    """Return the text up to the end of the last message's content, which the model goes on with. The last end mark in it is
    ours: a client's own would stand before it."""
    place = text.rfind(_END.rstrip())
    if place < 0 or content.strip() not in text:
        raise InvalidRequest("the final message does not stand in the prompt as it is", field="continue_final_message")
    trimmed = not text.startswith(_END, place) and bool(content.strip())
    return text[:place].rstrip() if trimmed else text[:place]


def _message(message: ChatMessage, arguments: Sequence[Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": shown}}
            for call, shown in zip(message.calls, arguments, strict=True)
        ]
    if message.call_id:
        made["tool_call_id"] = message.call_id
    if message.name:
        made["name"] = message.name
    return made


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        function["parameters"] = json.loads(tool.parameters)
    return {"type": "function", "function": function}
