"""Requests to vLLM's `/inference/v1/generate` and its answers, as plain values. Pure.

Its interface takes ids of tokens and gives ids, so texts and stop strings stay with pdserve. All fields that vLLM would fill in
from the model's files are set here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from kvtransfer.ticket import MAX_PARAMS_BYTES
from pdserve.core.errors import InvalidRequest, PdserveError, ReplicaLost
from pdserve.core.request_spec import RequestSpec
from pdserve.core.sampling import FinishReason, TokenLogprobs
from pdserve.core.structured.constraint import FIELD, Constraint, ConstraintKind
from pdserve.worker.messages import EngineKv

MAX_LINE_BYTES: Final = 4 << 20
"""An answer, or an event of a stream, has at most so many bytes. The largest has the log-probabilities of a long prompt."""
_SEED_BITS: Final = 63
_MIX: Final = 0x9E3779B97F4A7C15
"""The fraction of the golden ratio, by which splitmix64 spreads consecutive numbers."""
_ASK: Final[Mapping[str, Any]] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_FINISH: Final = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, None: None}


class BadAnswer(ReplicaLost):
    """vLLM answered what its interface does not have. The request is done again elsewhere."""


class Chunk(NamedTuple):
    """Tokens of an answer, in order. `finish_reason` belongs to the last one. `logprobs` has an entry for each, or none at
    all."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprobs, ...] = ()


def prefill_body(spec: RequestSpec, resumed: Sequence[int], eos: Sequence[int]) -> dict[str, Any]:
    """Return the request for a prompt's KV and token 0. A request of one token asks for no KV, which nobody would fetch."""
    body = _body(spec, (*spec.prompt_ids, *resumed), len(resumed), eos)
    if spec.sampling.max_tokens - len(resumed) > 1:
        body["kv_transfer_params"] = dict(_ASK)
    params = body["sampling_params"]
    params["max_tokens"], params["min_tokens"] = 1, min(1, params["min_tokens"])
    return body


def decode_body(
    spec: RequestSpec, drawn: Sequence[int], eos: Sequence[int], kv: EngineKv | None, block_size: int
) -> dict[str, Any]:
    """Return the request for the tokens that follow `drawn`, which are output already. `kv` is that of the prompt before the
    last of them. None: the whole is computed."""
    body = _body(spec, (*spec.prompt_ids, *drawn), len(drawn), eos)
    body["stream"] = True
    if kv is not None:
        body["kv_transfer_params"] = _fetched(kv, len(spec.prompt_ids) + len(drawn) - 1, block_size)
    return body


def discard_body(prompt_ids: Sequence[int], kv: EngineKv, block_size: int) -> dict[str, Any]:
    """Return a request whose end frees KV on the lender's side. Its connection is closed before it can compute much."""
    return {
        "token_ids": [*prompt_ids, prompt_ids[-1]],
        "sampling_params": {"max_tokens": 1, "temperature": 0.0, "detokenize": False},
        "stream": True,
        "kv_transfer_params": _fetched(kv, len(prompt_ids), block_size),
    }


def _fetched(kv: EngineKv, computed: int, block_size: int) -> dict[str, Any]:
    """Return the engines' ticket as the reader's engine takes it. Where the lent tokens fill their blocks, it needs the id of
    one more block than was lent, which it writes before it reads it; without it, its process ends by an assertion."""
    params: dict[str, Any] = json.loads(kv.params)
    if computed % block_size == 0:
        params["remote_block_ids"] = [[*group, group[-1]] for group in params["remote_block_ids"]]
    return params


def _body(spec: RequestSpec, token_ids: tuple[int, ...], drawn: int, eos: Sequence[int]) -> dict[str, Any]:
    asked = spec.sampling
    params: dict[str, Any] = {
        "max_tokens": asked.max_tokens - drawn,
        "min_tokens": max(0, asked.min_tokens - drawn),
        "temperature": asked.temperature,
        "top_k": asked.top_k,
        "top_p": asked.top_p,
        "min_p": asked.min_p,
        "seed": None if asked.greedy else seed_after(asked.seed, drawn),
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "repetition_penalty": asked.repetition_penalty,
        "logit_bias": {str(token_id): bias for token_id, bias in asked.logit_bias} or None,
        "logprobs": asked.logprobs,
        "stop_token_ids": sorted({*asked.stop_token_ids, *(() if asked.ignore_eos else eos)}),
        "ignore_eos": True,  # the ids that end an output are named above: those of the model that pdserve read
        "detokenize": False,
    }
    if spec.constraint is not None:
        if drawn:
            raise ReplicaLost(f"{FIELD}: vLLM cannot take up an output again that follows a grammar")
        params["structured_outputs"] = _structured(spec.constraint)
    body: dict[str, Any] = {"token_ids": list(token_ids), "sampling_params": params, "stream": False}
    if spec.cache_salt:
        body["cache_salt"] = spec.cache_salt
    return body


def seed_after(seed: int, drawn: int) -> int:
    """Return the seed for the tokens that follow `drawn` ones. vLLM begins with its random numbers anew in each request, so the
    same seed would draw token 1 with the numbers of token 0."""
    return (seed + drawn * _MIX) & ((1 << _SEED_BITS) - 1)


def _structured(constraint: Constraint) -> dict[str, Any]:
    match constraint.kind:
        case ConstraintKind.CHOICE:
            return {"choice": list(constraint.choices)}
        case ConstraintKind.JSON_OBJECT:
            return {"json_object": True}
        case ConstraintKind.LARK:
            raise InvalidRequest(
                "vLLM takes no Lark grammars: use json, regex or choice", field=f"{FIELD}.{constraint.kind.value}"
            )
        case _:
            return {constraint.kind.value: constraint.text}


# Answers -----------------------------------------------------------------------------------------------------------------


def read_chunk(answer: Any, *, top: int | None) -> Chunk | None:
    """Read an answer, or one event of a stream. `top` is how many likeliest tokens were asked for. None: an event without
    tokens.

    Raises `BadAnswer` for what is no such answer, and what `_reported` returns for an error that vLLM reports.
    """
    try:
        if "error" in answer:
            raise _reported(answer["error"])
        choices = answer["choices"]
        if not choices:
            return None
        (choice,) = choices
        finish = choice["finish_reason"]
        if finish not in _FINISH:
            raise ReplicaLost(f"vLLM ended the request with {finish!r:.40}")
        token_ids = tuple(choice["token_ids"] or ())
        _check_ids(token_ids)
        logprobs = () if top is None else tuple(_logprobs(one, top) for one in (choice["logprobs"] or {}).get("content", ()))
        if top is not None and len(logprobs) != len(token_ids):
            raise BadAnswer(f"vLLM sent {len(token_ids)} tokens with {len(logprobs)} log-probabilities")
        return Chunk(token_ids, _FINISH[finish], logprobs)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
        raise BadAnswer(f"vLLM sent what is no answer ({exc!r:.100}): {answer!r:.200}") from exc


def _reported(error: Any) -> PdserveError:
    """Return the error that vLLM reports in an answer of status 200. It gives the statuses of HTTP to them."""
    message, code = str(error.get("message", error))[:300], error.get("code")
    if code == HTTPStatus.BAD_REQUEST:
        return InvalidRequest(f"vLLM refuses it: {message}", field="request")
    return ReplicaLost(f"vLLM reports: {message}")


def _logprobs(one: Any, top: int) -> TokenLogprobs:
    likeliest = sorted((entry["rank"], entry["token_id"], entry["logprob"]) for entry in one["top_logprobs"])
    _check_ids([token_id for _, token_id, _ in likeliest])
    return TokenLogprobs(
        _finite(one["logprob"]), tuple((token_id, _finite(logprob)) for rank, token_id, logprob in likeliest if rank <= top)
    )


def _check_ids(token_ids: Sequence[Any]) -> None:
    if not all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
        raise BadAnswer(f"vLLM sent token ids {token_ids!r:.80}")


def _finite(value: Any) -> float:
    number = float(value)
    if math.isnan(number):
        raise ValueError("a log-probability is NaN")
    return number


def read_kv(answer: Any, prompt_len: int, block_size: int) -> EngineKv:
    """Read the engines' ticket of a prefill. Raises `BadAnswer` unless it is of exactly the blocks of this prompt."""
    try:
        params = answer["kv_transfer_params"]
        tables = params["remote_block_ids"]
        num_blocks = -(-prompt_len // block_size)
        if params["do_remote_prefill"] is not True or params["remote_num_tokens"] != prompt_len:
            raise BadAnswer(f"vLLM lent {params['remote_num_tokens']!r:.20} tokens of {prompt_len}")
        if not tables or any(len(table) != num_blocks for table in tables):
            raise BadAnswer(f"vLLM lent {[len(table) for table in tables]} blocks for {prompt_len} tokens of {block_size} each")
        if not all(params[name] for name in ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")):
            raise BadAnswer(f"the ticket of vLLM names no engine: {params!r:.200}")
        kv = EngineKv(num_blocks, json.dumps(params).encode())
        if len(kv.params) > MAX_PARAMS_BYTES:
            raise BadAnswer(f"the ticket of vLLM has {len(kv.params)} bytes, at most {MAX_PARAMS_BYTES} are handed over")
        return kv
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise BadAnswer(f"vLLM sent no ticket ({exc!r:.100}): {answer!r:.200}") from exc


def read_hits(answer: Any, prompt_len: int, block_size: int) -> int:
    """Read how many blocks of a prompt the prefill server had already: less than all, since it computes at least the last
    token. A server that does not tell has had none."""
    cached = answer["kv_transfer_params"].get("remote_prefill_cached_tokens")
    return min(cached, prompt_len - 1) // block_size if isinstance(cached, int) and cached > 0 else 0
