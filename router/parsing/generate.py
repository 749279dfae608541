"""Messages of the client API become what the router takes. Only fields that the client set are passed on."""

from __future__ import annotations

import math
from collections.abc import Container, MutableMapping, MutableSequence
from dataclasses import dataclass, replace
from typing import Any, Final

from google.protobuf.message import Message

from pdserve.core.errors import ContextOverflow, InvalidRequest
from pdserve.core.limits import MAX_MESSAGES, MaxCount, limit_of
from pdserve.core.request_spec import OPTIONS
from pdserve.core.sampling import Placement, SamplingParams
from pdserve.rpc.codec import constraint_from_wire, placement_from_wire
from pdserve.rpc.v1 import inference_pb2
from router.api.request import (
    BEAM_WIDTHS,
    LENGTH_PENALTIES,
    MAX_CALL_CHOICES,
    ChatMessage,
    ChatPrompt,
    Choices,
    DetokenizeInput,
    GenerateInput,
    Prompt,
    ToolCall,
    ToolChoice,
    ToolMode,
    check_beams,
    draft_options,
    sampled,
)
from router.openai.prompt import MAX_TOOLS, read_tools, read_variables

_TOOL_MODES: Final = {0: ToolMode.AUTO, 1: ToolMode.AUTO, 2: ToolMode.NONE, 3: ToolMode.REQUIRED}
"""The mode of each number of `ToolChoice.Mode`."""

MAX_BATCH: Final = 256
"""The most requests of one batch: as many as HTTP takes prompts in one body."""


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One request with its choices."""

    input: GenerateInput
    choices: Choices

    def of_client(self, client: tuple[str, ...]) -> GenerateCall:
        """Return the request with the names of its client."""
        return replace(self, input=replace(self.input, client=client))


@dataclass(frozen=True, slots=True)
class RefusedRequest:
    """One request of a batch that cannot be run."""

    message: str
    field: str

    @property
    def error(self) -> InvalidRequest:
        """The reason."""
        return InvalidRequest(self.message, field=self.field)


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """The requests of one call."""

    calls: tuple[GenerateCall | RefusedRequest, ...]

    def of_client(self, client: tuple[str, ...]) -> RequestBatch:
        """Return the requests with the names of their client."""
        return RequestBatch(tuple([one if isinstance(one, RefusedRequest) else one.of_client(client) for one in self.calls]))


def generate_batch(
    request: inference_pb2.GenerateBatchRequest,
    *,
    call_remaining_s: float | None,
    max_deadline_s: float,
    max_prompt_tokens: int,
) -> RequestBatch:
    """Return the requests of a batch. Raises `InvalidRequest` if there are none or too many."""
    if len(request.requests) > MAX_BATCH:
        raise InvalidRequest(f"has {len(request.requests)} requests; at most {MAX_BATCH} are allowed", field="requests")
    if not request.requests:
        raise InvalidRequest("is empty", field="requests")
    calls: list[GenerateCall | RefusedRequest] = []
    left = MAX_CALL_CHOICES
    for one in request.requests:
        try:
            call = generate_call(
                one,
                call_remaining_s=call_remaining_s,
                max_deadline_s=max_deadline_s,
                max_prompt_tokens=max_prompt_tokens,
            )
            if call.choices.requests > left:
                more = f"{call.choices.requests} choices are more than the {left} that the batch has left of {MAX_CALL_CHOICES}"
                raise InvalidRequest(more, field="n")
        except InvalidRequest as exc:
            calls.append(RefusedRequest(exc.message, exc.field))
        else:
            left -= call.choices.requests
            calls.append(call)
    return RequestBatch(tuple(calls))


def generate_call(
    request: inference_pb2.GenerateRequest,
    *,
    call_remaining_s: float | None,
    max_deadline_s: float,
    max_prompt_tokens: int,
) -> GenerateCall:
    """Return the request of a message with its choices, otherwise like `generate_input`."""
    asked = generate_input(
        request, call_remaining_s=call_remaining_s, max_deadline_s=max_deadline_s, max_prompt_tokens=max_prompt_tokens
    )
    return GenerateCall(asked, _choices(request, asked))


def _choices(request: inference_pb2.GenerateRequest, asked: GenerateInput) -> Choices:
    if not request.beam_width:
        if request.HasField("length_penalty"):
            raise InvalidRequest("is only allowed with beam_width", field="length_penalty")
        return sampled(request.n or 1, request.best_of or None)
    BEAM_WIDTHS.check("beam_width", request.beam_width)
    for name in ("n", "best_of"):
        if getattr(request, name):
            raise InvalidRequest("is not allowed beside beam_width, which is the number of choices", field=name)
    check_beams(asked)
    penalty = request.length_penalty if request.HasField("length_penalty") else 1.0
    LENGTH_PENALTIES.check("length_penalty", penalty)
    return Choices(request.beam_width, beam_width=request.beam_width, length_penalty=penalty)


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
        sampling=sampling_of(request.sampling),
        model=request.model or None,
        correlation_id=request.request_id,
        deadline_s=earlier(request.deadline_s if request.HasField("deadline_s") else None, call_remaining_s, max_deadline_s),
        placement=_placement(request.placement),
        slo_class=request.slo_class,
        session_id=request.session_id,
        constraint=constraint_from_wire(request.structured_outputs) if request.HasField("structured_outputs") else None,
        tool_choice=_tool_choice(request.tool_choice),
        options={descriptor.name: value for descriptor, value in request.ListFields() if descriptor.name in OPTIONS}
        | draft_options(
            request.speculation or None,
            request.num_speculative_tokens if request.HasField("num_speculative_tokens") else None,
        ),
    )


def prompt_of(request: inference_pb2.GenerateRequest | inference_pb2.TokenizeRequest, max_tokens: int) -> Prompt:
    """Return the prompt. Counts are checked before anything is copied, since a message has room for millions of ids and of chat
    messages. Raises `InvalidRequest`."""
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return request.text
    if kind == "tokens" and isinstance(request, inference_pb2.GenerateRequest):
        if (count := len(request.tokens.ids)) > max_tokens:
            raise ContextOverflow.of_prompt(f"{count} tokens", max_tokens + 1, field="prompt")
        return tuple(request.tokens.ids)
    if kind == "chat":
        if not request.chat.messages:
            raise InvalidRequest("is empty", field="messages")
        _check_count("messages", len(request.chat.messages), MAX_MESSAGES)
        return _chat(request.chat)
    raise InvalidRequest("is missing: set text, tokens or chat", field="prompt")


def detokenize_input(request: inference_pb2.DetokenizeRequest, max_prompt_tokens: int) -> DetokenizeInput:
    """Return the ids of a message. A message with more than a request can have is refused by their count."""
    if (count := len(request.ids)) > max_prompt_tokens + 1:
        raise InvalidRequest(f"has {count} ids; at most max_model_len {max_prompt_tokens + 1} are allowed", field="ids")
    return DetokenizeInput(request.model or None, tuple(request.ids), request.skip_special_tokens, "ids")


def _chat(chat: inference_pb2.ChatPrompt) -> Prompt:
    messages = tuple(_chat_message(message, f"messages[{i}]") for i, message in enumerate(chat.messages))
    if not chat.tools and not chat.template_kwargs:
        return messages
    tools = read_tools([text.encode() for text in chat.tools])
    variables = read_variables(chat.template_kwargs.encode(), "template_kwargs") if chat.template_kwargs else ""
    return ChatPrompt(messages, tools, variables)


def _chat_message(message: inference_pb2.ChatMessage, field: str) -> ChatMessage:
    """Return a message of a chat. Its content may be missing only if it has calls."""
    _check_count(f"{field}.tool_calls", len(message.tool_calls), MAX_TOOLS)
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest("is only allowed in a message of the assistant", field=f"{field}.tool_calls")
    calls = tuple(ToolCall(one.id, one.name, one.arguments or "{}") for one in message.tool_calls)
    content = None if calls and not message.content else message.content
    return ChatMessage(message.role, content, calls, message.tool_call_id, message.name, message.reasoning)


def _tool_choice(choice: inference_pb2.ToolChoice) -> ToolChoice:
    if choice.mode not in _TOOL_MODES:
        raise InvalidRequest(f"{choice.mode} is no mode", field="tool_choice.mode")
    if choice.function and choice.mode:
        raise InvalidRequest("must be unset beside a function", field="tool_choice.mode")
    return ToolChoice(_TOOL_MODES[choice.mode], choice.function, parallel=not choice.at_most_one)


def sampling_of(message: Message, leave_out: Container[str] = ()) -> dict[str, Any]:
    """Return the sampling fields of a message that are present: zero or not if the field can be absent, else if it is not zero
    or empty. Raises `InvalidRequest` for too many entries before they are copied."""
    values = {descriptor.name: value for descriptor, value in message.ListFields() if descriptor.name not in leave_out}
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


def earlier(asked_s: float | None, call_remaining_s: float | None, max_deadline_s: float) -> float | None:
    """Return the earlier one of the deadline that a request asks for and of that of its call. The latter is cut to
    `max_deadline_s` instead of refused, because clients set it as long as they like."""
    if call_remaining_s is None or (asked_s is not None and math.isnan(asked_s)):
        return asked_s
    if asked_s is None:
        return min(call_remaining_s, max_deadline_s)
    return min(asked_s, call_remaining_s)
