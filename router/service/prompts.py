"""Prompts as clients write them become token ids. Long prompts are encoded in a thread."""

from __future__ import annotations

from typing import Final, cast

from pdserve.core.errors import ContextOverflow, InvalidRequest
from router.api.request import ChatMessage, ChatPrompt, DetokenizeInput, Prompt
from router.core.turns import Path
from router.service.chat_text import chat_chars, chat_parts, chat_text
from router.service.limits import LengthLimit
from router.service.loop_time.serial_thread import SerialThread
from router.service.model import ServedModel

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
        if isinstance(prompt, str):
            return await self._text(prompt, "prompt", client, special_tokens=add_special_tokens, must_fit=must_fit)
        if isinstance(prompt, ChatPrompt):
            return await self._chat(prompt, client, must_fit=must_fit)
        if prompt and isinstance(prompt[0], ChatMessage):
            return await self._chat(ChatPrompt(prompt), client, must_fit=must_fit)
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
        return await self._thread.run(
            lambda: decode(ids, skip_special_tokens=asked.skip_special_tokens), asked.client, len(ids)
        )

    def _check_count(self, count: int) -> None:
        limit = self._limit.max_model_len
        if count >= limit:
            raise ContextOverflow.of_prompt(f"{count} tokens", limit, field="prompt")

    def _ids(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        if not ids:
            raise InvalidRequest("is empty", field="prompt")
        vocab_size = self._model.card.vocab_size
        low, high = min(ids), max(ids)
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise InvalidRequest(f"token id {wrong} is not in [0, {vocab_size - 1}]", field="prompt")
        return ids

    async def _chat(self, chat: ChatPrompt, client: Path, *, must_fit: bool) -> tuple[int, ...]:
        template = self._model.tokenizer.chat_template
        if template is None:
            raise InvalidRequest(f"model {self._model.name} has no chat template: send a text prompt", field="messages")
        chars = chat_chars(chat)
        self._check_chars(chars, "messages")
        size = chars + PART_CHARS * chat_parts(chat)
        if size <= INLINE_CHARS:
            text = chat_text(template, chat)
        else:
            text = await self._thread.run(lambda: chat_text(template, chat), client, size)
        return await self._text(text, "messages", client, special_tokens=False, must_fit=must_fit)

    async def _text(self, text: str, field: str, client: Path, *, special_tokens: bool, must_fit: bool) -> tuple[int, ...]:
        if not text:
            raise InvalidRequest("is empty", field=field)
        self._check_chars(len(text), field)
        if must_fit:
            self._check_least(text, field)
        encode = self._model.tokenizer.encode
        if len(text) <= INLINE_CHARS:
            ids = encode(text, add_special_tokens=special_tokens)
        else:
            ids = await self._thread.run(lambda: encode(text, add_special_tokens=special_tokens), client, len(text))
        if not ids:
            raise InvalidRequest("has no tokens", field=field)
        return tuple(ids)

    def _check_chars(self, count: int, field: str) -> None:
        limit = self._limit.max_model_len
        if count > limit * MAX_CHARS_PER_TOKEN:
            raise ContextOverflow.of_prompt(f"more than {limit} tokens, since it has {count} characters", limit, field=field)

    def _check_least(self, text: str, field: str) -> None:
        limit = self._limit.max_model_len
        least = self._model.tokenizer.least_tokens(text) if len(text) >= limit else 0
        if least >= limit:
            raise ContextOverflow.of_prompt(f"at least {least} tokens", limit, field=field)
