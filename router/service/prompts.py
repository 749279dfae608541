"""Prompts as clients write them become token ids. Long prompts are encoded in a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, cast

from pdserve.core.errors import InvalidRequest, Overloaded
from router.api.request import ChatMessage, ChatPrompt, DetokenizeInput, Prompt
from router.service.chat_text import chat_chars, chat_parts, chat_text
from router.service.limits import LengthLimit
from router.service.loop_time.serial_thread import SerialThread
from router.service.model import ServedModel

T = TypeVar("T")

INLINE_CHARS: Final = 4096
"""Prompts up to this length are encoded on the loop: about 1 ms, at 0.3 s a megabyte. Longer ones would delay everybody's
tokens."""
INLINE_PARTS: Final = 128
"""Chats of up to so many messages, calls and tools are rendered on the loop: about 3 ms, at 7 to 20 us each."""
INLINE_IDS: Final = 4096
"""So many ids are decoded on the loop: about 1 ms."""
MAX_CHARS_PER_TOKEN: Final = 256
"""A text longer than this times max_model_len is refused unread. No vocabulary has longer words worth the time."""
MAX_ENCODING: Final = 64
"""At most this many long prompts wait for the thread or are in it."""


class PromptEncoder:
    """Encodes prompts of clients. It owns its thread; `close` it."""

    def __init__(self, model: ServedModel, limit: LengthLimit) -> None:
        self._model = model
        self._limit = limit
        self._turns = SerialThread("tokenize")
        self._encoding = 0

    def close(self) -> None:
        """Stop the thread without waiting. Callers of `encode` that still wait for it get `Unavailable`."""
        self._turns.close()

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the ids of a prompt: at least one, each in range. The caller checks the length of encoded text. Raises
        `InvalidRequest` naming `prompt` or `messages`, and `Overloaded` when too many long prompts wait."""
        if isinstance(prompt, str):
            return await self._text(prompt, "prompt", special_tokens=add_special_tokens)
        if isinstance(prompt, ChatPrompt):
            return await self._chat(prompt)
        if prompt and isinstance(prompt[0], ChatMessage):
            return await self._chat(ChatPrompt(prompt))
        self._check_count(len(prompt))  # comes before the ids are walked: a body has room for millions
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
        return await self._in_thread(lambda: decode(ids, skip_special_tokens=asked.skip_special_tokens))

    def _check_count(self, count: int) -> None:
        limit = self._limit.max_model_len
        if count >= limit:
            raise InvalidRequest(f"has {count} tokens; at most {limit - 1} fit max_model_len {limit}", field="prompt")

    def _ids(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        if not ids:
            raise InvalidRequest("is empty", field="prompt")
        vocab_size = self._model.card.vocab_size
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"token id {wrong} is not in [0, {vocab_size - 1}]", field="prompt")
        return ids

    async def _chat(self, chat: ChatPrompt) -> tuple[int, ...]:
        template = self._model.tokenizer.chat_template
        if template is None:
            raise InvalidRequest(f"model {self._model.name} has no chat template: send a text prompt", field="messages")
        chars = chat_chars(chat)
        self._check_chars(chars, "messages")
        if chars <= INLINE_CHARS and chat_parts(chat) <= INLINE_PARTS:
            text = chat_text(template, chat)
        else:
            text = await self._in_thread(lambda: chat_text(template, chat))
        return await self._text(text, "messages", special_tokens=False)

    async def _text(self, text: str, field: str, *, special_tokens: bool) -> tuple[int, ...]:
        if not text:
            raise InvalidRequest("is empty", field=field)
        self._check_chars(len(text), field)
        encode = self._model.tokenizer.encode
        if len(text) <= INLINE_CHARS:
            ids = encode(text, add_special_tokens=special_tokens)
        else:
            ids = await self._in_thread(lambda: encode(text, add_special_tokens=special_tokens))
        if not ids:
            raise InvalidRequest("has no tokens", field=field)
        return tuple(ids)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._encoding >= MAX_ENCODING:
            raise Overloaded(f"{MAX_ENCODING} long prompts are being tokenised", retry_after_s=1.0)
        self._encoding += 1
        try:
            return await self._turns.run(work)
        finally:
            self._encoding -= 1

    def _check_chars(self, count: int, field: str) -> None:
        limit = self._limit.max_model_len
        if count > limit * MAX_CHARS_PER_TOKEN:
            raise InvalidRequest(f"has {count} characters, more than could fit max_model_len {limit} tokens", field=field)
