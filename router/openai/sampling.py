"""The sampling fields of an OpenAI-style body."""

from __future__ import annotations

import re
from typing import Any, Final

from pdserve.core.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from router.openai.json import Fields, refuse, section, show, text
from router.openai.prompt import read_token_ids

COMPLETION_DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's default for /v1/completions only; a chat answer may use the whole context
MAX_TOKENS_LIMIT: Final = 1 << 31
_TOKEN_ID: Final = re.compile("0|[1-9][0-9]{0,9}")


def read_sampling(fields: Fields, *, chat: bool) -> dict[str, Any]:
    """Return the fields that the client set, under the router's names. Raises `InvalidRequest` naming the field."""
    values: dict[str, Any] = {
        "max_tokens": _max_tokens(fields) or (None if chat else COMPLETION_DEFAULT_MAX_TOKENS),
        "temperature": fields.number("temperature"),
        "top_k": _top_k(fields),
        "top_p": fields.number("top_p"),
        "min_p": fields.number("min_p"),
        "seed": _seed(fields),
        "stop": _stop(fields),
        "stop_token_ids": read_token_ids(fields, "stop_token_ids", MAX_STOP_TOKEN_IDS),
        "min_tokens": fields.integer("min_tokens"),
        "ignore_eos": fields.boolean("ignore_eos"),
        "presence_penalty": fields.number("presence_penalty"),
        "frequency_penalty": fields.number("frequency_penalty"),
        "repetition_penalty": fields.number("repetition_penalty"),
        "logit_bias": _logit_bias(fields),
        "logprobs": _chat_logprobs(fields) if chat else _completion_logprobs(fields),
    }
    return {name: value for name, value in values.items() if value is not None}


def _max_tokens(fields: Fields) -> int | None:
    """Return the limit of output tokens. If both names are given, the newer one counts. The range is checked here so that the
    error has the name that was used."""
    older = fields.integer("max_tokens", 1, MAX_TOKENS_LIMIT)
    newer = fields.integer("max_completion_tokens", 1, MAX_TOKENS_LIMIT)
    return older if newer is None else newer


def _top_k(fields: Fields) -> int | None:
    """Return top_k. vLLM's clients write -1 for off, the router 0."""
    top_k = fields.integer("top_k")
    return 0 if top_k == -1 else top_k


def _seed(fields: Fields) -> int | None:
    """Return the seed. OpenAI's seed is a signed 64-bit number, the router's is unsigned: a negative one wraps, so distinct
    seeds stay distinct."""
    seed = fields.integer("seed", -(1 << 63), (1 << 64) - 1)
    return None if seed is None else seed % (1 << 64)


def _stop(fields: Fields) -> tuple[str, ...] | None:
    value = fields.raw("stop")
    if value is None:
        return None
    if isinstance(value, list):
        if len(value) > MAX_STOP_STRINGS:
            raise refuse("stop", f"has {len(value)} strings; at most {MAX_STOP_STRINGS} are allowed")
        return tuple(text(item, f"stop[{i}]") for i, item in enumerate(value))
    return (text(value, "stop"),)


def _logit_bias(fields: Fields) -> dict[int, float] | None:
    """Return biases by token id. JSON has {"token id": bias}, since its keys are strings. The router checks the vocabulary and
    the range of biases."""
    values = fields.raw("logit_bias")
    if values is None:
        return None
    biases = section(values, "logit_bias")
    if len(values) > MAX_LOGIT_BIASES:
        raise refuse("logit_bias", f"has {len(values)} entries; at most {MAX_LOGIT_BIASES} are allowed")
    return {_token_id(key): _bias(biases, key) for key in values}


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise refuse("logit_bias", f"{show(key)} is not a token id")
    return int(key)


def _bias(biases: Fields, key: str) -> float:
    bias = biases.number(key)
    if bias is None:
        raise refuse("logit_bias", f"of token id {key} must be a number, got null")
    return bias


def _completion_logprobs(fields: Fields) -> int | None:
    """Return the number of likeliest tokens. 0 asks for the drawn tokens alone; None, which some clients write as false, asks
    for nothing."""
    return None if fields.raw("logprobs") is False else fields.integer("logprobs", 0, MAX_LOGPROBS)


def _chat_logprobs(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
    if fields.boolean("logprobs"):
        return top or 0
    if top:
        raise refuse("top_logprobs", "is only allowed with logprobs: true")
    return None
