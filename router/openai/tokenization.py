"""The bodies of `/tokenize` and `/detokenize`, in vLLM's shape. A field that they do not have is refused by name."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw, Struct

from router.api.request import DetokenizeInput, TokenizeInput
from router.openai.body import Message
from router.openai.json import decode, refuse, refuse_unsupported, unsupported
from router.openai.prompt import read_messages, token_ids


class TokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/tokenize`: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: Raw = unsupported(True)
    continue_final_message: Raw = unsupported(False)
    chat_template: Raw = unsupported()
    chat_template_kwargs: Raw = unsupported({})
    mm_processor_kwargs: Raw = unsupported({})
    tools: Raw = unsupported([])


class DetokenizeBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int] | None = None


_TOKENIZE: Final = msgspec.json.Decoder(TokenizeBody)
_DETOKENIZE: Final = msgspec.json.Decoder(DetokenizeBody)


def parse_tokenize(body: bytes) -> TokenizeInput:
    """Parse a body of `/tokenize`. Raises `InvalidRequest` naming the field."""
    fields = decode(body, _TOKENIZE)
    refuse_unsupported(fields)
    if fields.prompt is not None and fields.messages is not None:
        raise refuse("messages", "is not allowed beside prompt")
    if fields.prompt is None and fields.messages is None:
        raise refuse("prompt", "is missing: set prompt or messages")
    if fields.messages is not None and fields.add_special_tokens:
        raise refuse("add_special_tokens", "must be false for messages: their template writes the special tokens")
    return TokenizeInput(
        fields.model,
        read_messages(fields.messages) if fields.prompt is None else fields.prompt,
        fields.add_special_tokens is not False,
        fields.return_token_strs or False,
    )


def parse_detokenize(body: bytes, max_ids: int) -> DetokenizeInput:
    """Parse a body of `/detokenize`. Raises `InvalidRequest` naming the field."""
    fields = decode(body, _DETOKENIZE)
    if fields.tokens is None:
        raise refuse("tokens", "is missing")
    if len(fields.tokens) > max_ids:
        raise refuse("tokens", f"has {len(fields.tokens)} ids; at most max_model_len {max_ids} are allowed")
    return DetokenizeInput(fields.model, token_ids(tuple(fields.tokens), "tokens"))
