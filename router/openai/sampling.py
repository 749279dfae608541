"""The sampling fields of an OpenAI-style body."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from pdserve.core.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS
from router.openai.body import Body, ChatBody, CompletionBody
from router.openai.json import decode, refuse, show
from router.openai.prompt import token_ids

COMPLETION_DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's default for /v1/completions only; a chat answer may use the whole context
MAX_TOKENS_LIMIT: Final = 1 << 31
_TOKEN_ID: Final = re.compile("0|[1-9][0-9]{0,9}")
_BIAS: Final = msgspec.json.Decoder(float)


def read_sampling(body: CompletionBody | ChatBody) -> dict[str, Any]:
    """Return the fields that the client set, under the router's names. Raises `InvalidRequest` naming the field."""
    chat = isinstance(body, ChatBody)
    values: dict[str, Any] = {
        "max_tokens": _max_tokens(body) or (None if chat else COMPLETION_DEFAULT_MAX_TOKENS),
        "temperature": body.temperature,
        "top_k": 0 if body.top_k == -1 else body.top_k,  # vLLM's clients write -1 for off, the router 0
        "top_p": body.top_p,
        "min_p": body.min_p,
        "seed": _seed(body),
        "stop": _stop(body.stop),
        "stop_token_ids": _stop_token_ids(body.stop_token_ids),
        "min_tokens": body.min_tokens,
        "ignore_eos": body.ignore_eos,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "repetition_penalty": body.repetition_penalty,
        "logit_bias": _logit_bias(body.logit_bias),
        "logprobs": _chat_logprobs(body) if isinstance(body, ChatBody) else _completion_logprobs(body),
    }
    return {name: value for name, value in values.items() if value is not None}


def _in_range(field: str, value: int | None, low: int, high: int) -> int | None:
    if value is not None and not low <= value <= high:
        raise refuse(field, f"must be from {low} to {high}, got {show(value)}")
    return value


def _max_tokens(body: Body) -> int | None:
    """Return the limit of output tokens. If both names are given, the newer one counts. The range is checked here so that the
    error has the name that was used."""
    older = _in_range("max_tokens", body.max_tokens, 1, MAX_TOKENS_LIMIT)
    newer = _in_range("max_completion_tokens", body.max_completion_tokens, 1, MAX_TOKENS_LIMIT)
    return older if newer is None else newer


def _seed(body: Body) -> int | None:
    """Return the seed. OpenAI's seed is a signed 64-bit number, the router's is unsigned: a negative one wraps, so distinct
    seeds stay distinct."""
    seed = _in_range("seed", body.seed, -(1 << 63), (1 << 64) - 1)
    return None if seed is None else seed % (1 << 64)


def _stop(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    if isinstance(stop, str):
        return (stop,)
    if len(stop) > MAX_STOP_STRINGS:
        raise refuse("stop", f"has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed")
    return tuple(stop)


def _stop_token_ids(ids: list[int] | None) -> tuple[int, ...] | None:
    if ids is None:
        return None
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise refuse("stop_token_ids", f"has {len(ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed")
    return token_ids(tuple(ids), "stop_token_ids")


def _logit_bias(biases: dict[str, msgspec.Raw] | None) -> dict[int, float] | None:
    """Return biases by token id. JSON has {"token id": bias}, since its keys are strings. The router checks the vocabulary and
    the range of biases."""
    if biases is None:
        return None
    if len(biases) > MAX_LOGIT_BIASES:
        raise refuse("logit_bias", f"has {len(biases)} entries; at most {MAX_LOGIT_BIASES} are allowed")
    return {_token_id(key): decode(bytes(bias), _BIAS, f"logit_bias.{key}") for key, bias in biases.items()}


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise refuse("logit_bias", f"{show(key)} is not a token id")
    return int(key)


def _completion_logprobs(body: CompletionBody) -> int | None:
    """Return the number of likeliest tokens. 0 asks for the drawn tokens alone; None, which some clients write as false, asks
    for nothing."""
    if body.logprobs is True:
        raise refuse("logprobs", "must be an integer or false, got true")
    return None if body.logprobs is False else _in_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)


def _chat_logprobs(body: ChatBody) -> int | None:
    top = _in_range("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
    if body.logprobs:
        return top or 0
    if top:
        raise refuse("top_logprobs", "is only allowed with logprobs: true")
    return None
