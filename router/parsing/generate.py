"""Messages of the client API become what the router takes. Only fields that the client set are passed on."""

from __future__ import annotations

import math
from collections.abc import MutableMapping, MutableSequence
from typing import Any

from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import MAX_MESSAGES, MaxCount, limit_of
from pdserve.core.request_spec import OPTIONS
from pdserve.core.sampling import Placement, SamplingParams
from pdserve.rpc.codec import constraint_from_wire, placement_from_wire
from pdserve.rpc.v1 import common_pb2, inference_pb2
from router.api.request import ChatMessage, DetokenizeInput, GenerateInput, Prompt


def generate_input(
    request: inference_pb2.GenerateRequest,
    *,
    call_remaining_s: float | None,
    max_deadline_s: float,
    max_prompt_tokens: int,
) -> GenerateInput:
    """Return the request of a message. `call_remaining_s` is what is left of the call's own deadline, or None without one.
    Raises `InvalidRequest` naming the field."""
    return GenerateInput(
        prompt=prompt_of(request, max_prompt_tokens),
        sampling=_sampling(request.sampling),
        model=request.model or None,
        correlation_id=request.request_id,
        deadline_s=_deadline_s(request, call_remaining_s, max_deadline_s),
        placement=_placement(request.placement),
        slo_class=request.slo_class,
        session_id=request.session_id,
        constraint=constraint_from_wire(request.structured_outputs) if request.HasField("structured_outputs") else None,
        options={descriptor.name: value for descriptor, value in request.ListFields() if descriptor.name in OPTIONS},
    )


def prompt_of(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, max_tokens: int) -> Prompt:
    """Return the prompt. Counts are checked before anything is copied, since a message has room for millions of ids and of chat
    messages. Raises `InvalidRequest`."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "tokens" and isinstance(request, inference_pb2.GenerateRequest):
        if (count := len(request.tokens.ids)) > max_tokens:
            fit = f"at most {max_tokens} fit max_model_len {max_tokens + 1}"
            raise InvalidRequest(f"has {count} tokens; {fit}", field="prompt")
        return tuple(request.tokens.ids)
    if kind == "chat":
        if not request.chat.messages:
            raise InvalidRequest("is empty", field="messages")
        _check_count("messages", len(request.chat.messages), MAX_MESSAGES)
        return tuple(ChatMessage(m.role, m.content) for m in request.chat.messages)
    raise InvalidRequest("is missing: set text, tokens or chat", field="prompt")


def detokenize_input(request: inference_pb2.DetokenizeRequest, max_prompt_tokens: int) -> DetokenizeInput:
    """Return the ids of a message. A message with more than a request can have is refused by their count."""
    if (count := len(request.ids)) > max_prompt_tokens + 1:
        raise InvalidRequest(f"has {count} ids; at most max_model_len {max_prompt_tokens + 1} are allowed", field="ids")
    return DetokenizeInput(request.model or None, tuple(request.ids), request.skip_special_tokens, "ids")


def _sampling(sampling: common_pb2.SamplingParams) -> dict[str, Any]:
    """Return the fields that are present, zero or not. Repeated fields are present when they are not empty."""
    values = {descriptor.name: value for descriptor, value in sampling.ListFields()}
    for name, value in values.items():
        if isinstance(value, MutableSequence | MutableMapping):
            _check_count(name, len(value), limit_of(SamplingParams, name, MaxCount).count)
            values[name] = dict(value) if isinstance(value, MutableMapping) else tuple(value)
    return values


def _check_count(field: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"has {count}; at most {limit} are allowed", field=field)


def _placement(wire: int) -> Placement | None:
    try:
        return placement_from_wire(wire)
    except KeyError:
        raise InvalidRequest(f"{wire} is not a placement", field="placement") from None


def _deadline_s(request: inference_pb2.GenerateRequest, call_remaining_s: float | None, max_deadline_s: float) -> float | None:
    """Return the earlier of both deadlines. The call's own is cut to `max_deadline_s` instead of refused, because clients set
    it as long as they like."""
    asked = request.deadline_s if request.HasField("deadline_s") else None
    if call_remaining_s is None or (asked is not None and math.isnan(asked)):
        return asked
    if asked is None:
        return min(call_remaining_s, max_deadline_s)
    return min(asked, call_remaining_s)
