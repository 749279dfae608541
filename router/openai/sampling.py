"""The sampling fields and the options of an OpenAI-style body."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Final

import msgspec

from pdserve.core.limits import IntRange, MaxCount, limit_of
from pdserve.core.request_spec import OPTIONS, RequestSpec
from pdserve.core.sampling import SamplingParams
from router.openai.body import Body, ChatBody, CompletionBody, Scalars
from router.openai.echo import PromptShown
from router.openai.json import decode, refuse, show
from router.openai.prompt import token_ids

COMPLETION_DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's default for /v1/completions only; a chat answer may use the whole context
_MAX_TOKENS: Final = limit_of(SamplingParams, "max_tokens", IntRange)
_LOGPROBS: Final = limit_of(SamplingParams, "logprobs", IntRange)
_PRIORITY: Final = limit_of(RequestSpec, "priority", IntRange)
_SEED: Final = IntRange(-(1 << 63), limit_of(SamplingParams, "seed", IntRange).high)
_TOKEN_ID: Final = re.compile("0|[1-9][0-9]{0,9}")
_PLAIN: Final = tuple(name for name in Scalars.__struct_fields__ if name not in OPTIONS)
_BIAS: Final = msgspec.json.Decoder(float)


def read_sampling(body: CompletionBody | ChatBody) -> dict[str, Any]:
    """Return the fields that the client set, under the router's names. Raises `InvalidRequest` naming the field.

    A field is read here only if its name or its form differs from the router's.
    """
    chat, shown = isinstance(body, ChatBody), read_shown(body)
    values: dict[str, Any] = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None} | {
        "max_tokens": 1 if shown.hides_output else _max_tokens(body) or (None if chat else COMPLETION_DEFAULT_MAX_TOKENS),
        "top_k": 0 if body.top_k == -1 else body.top_k,  # vLLM's clients write -1 for off, the router 0
        "seed": _seed(body),
        "stop": _stop(body.stop),
        "stop_token_ids": _stop_token_ids(body.stop_token_ids),
        "logit_bias": _logit_bias(body.logit_bias),
        "logprobs": _chat_logprobs(body) if isinstance(body, ChatBody) else _completion_logprobs(body),
        "prompt_logprobs": max((n for n in (shown.logprobs, shown.prompt_logprobs) if n is not None), default=None),
    }
    return {name: value for name, value in values.items() if value is not None}


def read_shown(body: CompletionBody | ChatBody) -> PromptShown:
    """Return the parts of the prompt that the answer shows. Raises `InvalidRequest` naming the field."""
    listed = _in_range("prompt_logprobs", body.prompt_logprobs, _LOGPROBS)
    if listed is not None and body.stream:
        raise refuse("prompt_logprobs", "is not allowed with stream: true (nor is it in vLLM)")
    if isinstance(body, ChatBody) or not body.echo:
        return PromptShown(prompt_logprobs=listed)
    if body.use_beam_search:
        raise refuse("echo", "is not allowed with use_beam_search: true")
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return PromptShown(True, _completion_logprobs(body), listed, hides_output=asked == 0)


def read_options(body: CompletionBody | ChatBody) -> dict[str, Any]:
    """Return the fields of `RequestSpec` that the client set, beside prompt and sampling. Raises `InvalidRequest`."""
    options = {name: value for name in OPTIONS if (value := getattr(body, name)) is not None}
    if (priority := _in_range("priority", body.priority, _PRIORITY)) is not None:
        options["priority"] = -priority  # vLLM's clients write a lower number for what goes first, the router a higher one
    return options


def _in_range(field: str, value: int | None, limit: IntRange) -> int | None:
    if value is not None and not limit.low <= value <= limit.high:
        raise refuse(field, f"must be from {limit.low} to {limit.high}, got {show(value)}")
    return value


def _max_tokens(body: Body) -> int | None:
    """Return the limit of output tokens. If both names are given, the newer one counts. The range is checked here so that the
    error has the name that was used."""
    older = _in_range("max_tokens", body.max_tokens, _MAX_TOKENS)
    newer = _in_range("max_completion_tokens", body.max_completion_tokens, _MAX_TOKENS)
    return older if newer is None else newer


def _seed(body: Body) -> int | None:
    """Return the seed. OpenAI's seed is a signed 64-bit number, the router's is unsigned: a negative one wraps, so distinct
    seeds stay distinct."""
    seed = _in_range("seed", body.seed, _SEED)
    return None if seed is None else seed % (1 << 64)


def _stop(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    if isinstance(stop, str):
        return (stop,)
    _check_count("stop", stop)
    return tuple(stop)


def _stop_token_ids(ids: list[int] | None) -> tuple[int, ...] | None:
    if ids is None:
        return None
    _check_count("stop_token_ids", ids)
    return token_ids(tuple(ids), "stop_token_ids")


def _logit_bias(biases: dict[str, msgspec.Raw] | None) -> dict[int, float] | None:
    """Return biases by token id. JSON has {"token id": bias}, since its keys are strings. The router checks the vocabulary and
    the range of biases."""
    if biases is None:
        return None
    _check_count("logit_bias", biases)
    return {_token_id(key): decode(bytes(bias), _BIAS, f"logit_bias.{key}") for key, bias in biases.items()}


def _check_count(field: str, values: Collection[Any]) -> None:
    limit_of(SamplingParams, field, MaxCount).check(field, values)


def _token_id(key: str) -> int:
    if not _TOKEN_ID.fullmatch(key):
        raise refuse("logit_bias", f"{show(key)} is not a token id")
    return int(key)


def _completion_logprobs(body: CompletionBody) -> int | None:
    """Return the number of likeliest tokens. 0 asks for the drawn tokens alone; None, which some clients write as false, asks
    for nothing."""
    if body.logprobs is True:
        raise refuse("logprobs", "must be an integer or false, got true")
    return None if body.logprobs is False else _in_range("logprobs", body.logprobs, _LOGPROBS)


def _chat_logprobs(body: ChatBody) -> int | None:
    top = _in_range("top_logprobs", body.top_logprobs, _LOGPROBS)
    if body.logprobs:
        return top or 0
    if top:
        raise refuse("top_logprobs", "is only allowed with logprobs: true")
    return None
