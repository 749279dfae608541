"""What a request must be to be let in: every refusal names the field and the limit. No I/O, but for the tokenizer."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from pdserve.core.errors import DeadlineExceeded, InvalidRequest, UnknownModel
from pdserve.core.ids import RequestId
from pdserve.core.sampling import SEED_LIMIT, SamplingParams
from pdserve.text.tokenizer import Tokenizer
from router.api import GenerateInput, Prompt
from router.events import Submit

MAX_REQUEST_ID_BYTES: Final = 128
PRIORITY_LIMIT: Final = 100
MAX_MODEL_SHOWN_CHARS: Final = 100  # of a name that is not ours, in the message


@dataclass(frozen=True, slots=True)
class Limits:
    """Of the model that is served."""

    model_name: str
    vocab_size: int
    max_model_len: int
    default_deadline_s: float
    max_deadline_s: float


def check_model(model: str | None, limits: Limits) -> None:
    if model and model != limits.model_name:
        shown = model if len(model) <= MAX_MODEL_SHOWN_CHARS else model[:MAX_MODEL_SHOWN_CHARS] + "..."
        raise UnknownModel(f"model {shown!r} is not served here; {limits.model_name!r} is", field="model")


def encode(prompt: Prompt, tokenizer: Tokenizer, limits: Limits) -> tuple[int, ...]:
    """The prompt's token ids, checked. Long texts take time: call it in a thread."""
    if isinstance(prompt, str):
        ids = tuple(tokenizer.encode(prompt))
    elif prompt and not isinstance(prompt[0], int):
        ids = _encode_chat(prompt, tokenizer)
    else:
        ids = tuple(prompt)  # type: ignore[arg-type]
        _check_ids(ids, limits)
    if not ids:
        raise InvalidRequest("must not be empty", field="prompt")
    if len(ids) >= limits.max_model_len:
        raise InvalidRequest(
            f"has {len(ids)} tokens; at most {limits.max_model_len - 1} leave room for an output token "
            f"(max_model_len is {limits.max_model_len})",
            field="prompt",
        )
    return ids


def _encode_chat(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    if not tokenizer.has_chat_template:
        raise InvalidRequest("this model has no chat template: send text or token ids", field="messages")
    text = tokenizer.apply_chat_template([(m.role, m.content) for m in prompt])  # type: ignore[union-attr]
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _check_ids(ids: tuple[int, ...], limits: Limits) -> None:
    bad = next((i for i in ids if not 0 <= i < limits.vocab_size), None)
    if bad is not None:
        raise InvalidRequest(f"token id {bad} is not from 0 to {limits.vocab_size - 1}", field="prompt")


def submission(request: GenerateInput, ids: tuple[int, ...], limits: Limits, *, now_s: float) -> Submit:
    """A request that may be queued. Raises `InvalidRequest` or `DeadlineExceeded`."""
    if not -PRIORITY_LIMIT <= request.priority <= PRIORITY_LIMIT:
        raise InvalidRequest(f"must be from -{PRIORITY_LIMIT} to {PRIORITY_LIMIT}, got {request.priority}", field="priority")
    return Submit(
        request_id=_request_id(request.request_id),
        prompt_ids=ids,
        sampling=_sampling(request, len(ids), limits),
        arrived_s=now_s,
        deadline_s=now_s + _deadline_s(request, limits),
        priority=request.priority,
        placement=request.placement,
    )


def _request_id(given: str | None) -> RequestId:
    if not given:
        return RequestId(secrets.token_hex(12))
    if len(given.encode()) > MAX_REQUEST_ID_BYTES or not given.isprintable():
        raise InvalidRequest(f"must be printable and at most {MAX_REQUEST_ID_BYTES} bytes", field="request_id")
    return RequestId(given)


def _deadline_s(request: GenerateInput, limits: Limits) -> float:
    """The nearest of what the client asked for, its transport's own, and the default. NaN is refused with the rest."""
    asked_s, wait_s = request.deadline_s, request.max_wait_s
    if (asked_s is not None and asked_s <= 0) or (wait_s is not None and wait_s <= 0):
        raise DeadlineExceeded("deadline_s has already passed")
    if asked_s is not None and not asked_s <= limits.max_deadline_s:
        raise InvalidRequest(f"must be at most {limits.max_deadline_s:g} s, got {asked_s:g}", field="deadline_s")
    deadline_s = limits.default_deadline_s if asked_s is None else asked_s
    return deadline_s if wait_s is None else min(deadline_s, wait_s)


def _sampling(request: GenerateInput, prompt_len: int, limits: Limits) -> SamplingParams:
    fields = dict(request.sampling)
    room = limits.max_model_len - prompt_len
    fields.setdefault("max_tokens", room)
    fields.setdefault("seed", secrets.randbelow(SEED_LIMIT))
    params = SamplingParams(**fields)
    if params.max_tokens > room:
        raise InvalidRequest(
            f"{params.max_tokens} and a prompt of {prompt_len} tokens exceed max_model_len {limits.max_model_len}; "
            f"at most {room} fit",
            field="max_tokens",
        )
    bad = next((i for i in params.stop_token_ids if not 0 <= i < limits.vocab_size), None)
    if bad is not None:
        raise InvalidRequest(f"token id {bad} is not from 0 to {limits.vocab_size - 1}", field="stop_token_ids")
    return params
