"""The requests of a program, and the `GenerateRequest` that each becomes. The names are those of the proto."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Final, TypedDict, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as Wire

from pdserve.core.errors import InvalidRequest
from pdserve.core.sampling import Placement
from pdserve.core.structured.constraint import FIELD
from pdserve.rpc.codec import placement_to_wire
from pdserve.rpc.v1 import common_pb2, inference_pb2

_Wire = TypeVar("_Wire", bound=Wire)

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, or token ids, or either in vLLM's form: {"prompt": text} or {"prompt_token_ids": ids}."""
Message = Mapping[str, Any]
"""One message of a chat in OpenAI's form: role, content, and where they are needed name, tool_calls, tool_call_id. The
content is a text, or a list of parts such as {"type": "text", "text": ...}."""


class Unset(Enum):
    """The value of a field that nobody has set, where None means something else."""

    UNSET = "unset"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The choice of tokens, and the end of the output. A field that is None is not sent, and has the router's default. The
    names are vLLM's; `SamplingParams` of common.proto explains each field and its limits, which the router checks."""

    max_tokens: int | Unset | None = Unset.UNSET
    """None: as many as fit. Unset, it means the same to a client, and 16 to `LLM`, as to vLLM."""
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None

    def to_wire(self) -> common_pb2.SamplingParams:
        """Return the message. Raises `InvalidRequest` naming the field."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None and value is not Unset.UNSET}
        if isinstance(self.stop, str):
            given["stop"] = [self.stop]
        return _filled(common_pb2.SamplingParams(), given)


class Options(TypedDict, total=False):
    """The other fields of a request. `GenerateRequest` of inference.proto explains each of them."""

    model: str
    request_id: str
    deadline_s: float
    priority: int
    placement: Placement | str
    cache_salt: str
    slo_class: str
    session_id: str
    speculation: str
    """auto or off."""
    num_speculative_tokens: int
    n: int
    best_of: int
    beam_width: int
    length_penalty: float
    structured_outputs: Mapping[str, Any]
    """One of {"json": schema}, {"json_object": True}, {"regex": ...}, {"choice": [...]}, {"grammar": ...}."""
    tools: Sequence[Mapping[str, Any]]
    """The functions that a chat may call, in OpenAI's form."""
    tool_choice: str | Mapping[str, Any]
    """auto, none, required, or {"type": "function", "function": {"name": ...}}."""
    parallel_tool_calls: bool
    template_kwargs: Mapping[str, Any]
    """Further variables of the chat template, such as enable_thinking."""


_SAMPLING: Final = frozenset(field.name for field in fields(SamplingParams))
_CONSTRAINTS: Final = tuple(field.name for field in common_pb2.StructuredOutputs.DESCRIPTOR.fields)
_SPECIAL: Final = frozenset({"placement", FIELD, "tools", "tool_choice", "parallel_tool_calls", "template_kwargs"})
_PLAIN: Final = frozenset(Options.__annotations__) - _SPECIAL
_KINDS: Final = {
    FieldDescriptor.CPPTYPE_STRING: "a text",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_DOUBLE: "a number",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_INT32: "a whole number that fits 32 bits",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number from 0 to 4294967295",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number from 0 to 18446744073709551615",
}
_OF_CHATS: Final = ("tools", "tool_choice", "parallel_tool_calls", "template_kwargs")
_MODES: Final = {
    "auto": inference_pb2.ToolChoice.MODE_AUTO,
    "none": inference_pb2.ToolChoice.MODE_NONE,
    "required": inference_pb2.ToolChoice.MODE_REQUIRED,
}


def text_request(prompt: Prompt, sampling: SamplingParams | None, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Return the request that continues a prompt. Raises `InvalidRequest` naming the field."""
    for name in _OF_CHATS:
        if name in options:
            raise InvalidRequest("is only allowed in a chat", field=name)
    request = _request(sampling, options)
    field = "prompt"
    if isinstance(prompt, Mapping):
        for name in prompt:
            if name not in ("prompt", "prompt_token_ids"):
                raise InvalidRequest("is no key of a prompt; prompt and prompt_token_ids are", field=f"prompt[{name!r:.100}]")
        if len(prompt) != 1:
            raise InvalidRequest("must hold either prompt or prompt_token_ids", field="prompt")
        ((field, prompt),) = prompt.items()
    if isinstance(prompt, str) and field == "prompt":
        return _filled(request, {"text": prompt})
    if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable):
        wanted = (
            "token ids" if field == "prompt_token_ids" else 'a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}'
        )
        raise InvalidRequest(f"must be {wanted}, got {prompt!r:.100}", field=field)
    _filled(request.tokens, {"ids": list(prompt)}, named=field)
    return request


def chat_request(
    messages: Sequence[Message], sampling: SamplingParams | None, options: Mapping[str, Any]
) -> inference_pb2.GenerateRequest:
    """Return the request that asks for the assistant's next message. Raises `InvalidRequest` naming the field."""
    request = _request(sampling, options)
    request.chat.SetInParent()
    for place, message in enumerate(messages):
        _add_message(request.chat, message, f"messages[{place}]")
    request.chat.tools.extend(json.dumps(tool) for tool in options.get("tools", ()))
    if "template_kwargs" in options:
        request.chat.template_kwargs = json.dumps(options["template_kwargs"])
    if (choice := options.get("tool_choice")) is not None:
        _choose(request.tool_choice, choice)
    if options.get("parallel_tool_calls") is False:
        request.tool_choice.at_most_one = True
    return request


def prompt_request(prompt: Prompt | Sequence[Message]) -> inference_pb2.TokenizeRequest:
    """Return the request for the token ids of a text or of a chat. Raises `InvalidRequest`."""
    request = inference_pb2.TokenizeRequest()
    if isinstance(prompt, str):
        return _filled(request, {"text": prompt})
    for place, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            raise InvalidRequest("must be a text or the messages of a chat", field="prompt")
        _add_message(request.chat, message, f"messages[{place}]")
    return request


def ids_request(ids: Sequence[int], skip_special_tokens: bool) -> inference_pb2.DetokenizeRequest:
    """Return the request for the text of token ids. Raises `InvalidRequest`."""
    return _filled(inference_pb2.DetokenizeRequest(skip_special_tokens=skip_special_tokens), {"ids": list(ids)})


def _request(sampling: SamplingParams | None, options: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    for name in options:
        if name not in _PLAIN and name not in _SPECIAL:
            place = "a field of SamplingParams, and no keyword" if name in _SAMPLING else "no field of a request"
            raise InvalidRequest(f"is {place}", field=name)
    request = _filled(inference_pb2.GenerateRequest(), {name: value for name, value in options.items() if name in _PLAIN})
    if sampling is not None:
        request.sampling.CopyFrom(sampling.to_wire())
    if (placement := options.get("placement")) is not None:
        try:
            request.placement = placement_to_wire(Placement(placement))
        except ValueError:
            wanted = ", ".join(one.value for one in Placement)
            raise InvalidRequest(f"must be one of {wanted}, got {placement!r:.100}", field="placement") from None
    if (constraint := options.get(FIELD)) is not None:
        _constrain(request.structured_outputs, constraint)
    return request


def _constrain(wire: common_pb2.StructuredOutputs, constraint: Mapping[str, Any]) -> None:
    """Write a constraint. A schema may be JSON text or an object."""
    given = dict(constraint)
    for name in given:
        if name not in _CONSTRAINTS:
            raise InvalidRequest(f"is none of {', '.join(_CONSTRAINTS)}", field=f"{FIELD}.{name}")
    if len(given) != 1:  # the message holds one of them, and would drop the others
        raise InvalidRequest(f"must hold exactly one of {', '.join(_CONSTRAINTS)}", field=FIELD)
    if isinstance(given.get("json"), Mapping):
        given["json"] = json.dumps(given["json"])
    if "choice" in given:
        _filled(wire.choice, {"texts": list(given.pop("choice"))}, named=f"{FIELD}.choice")
    _filled(wire, given, under=f"{FIELD}.")


def _add_message(chat: inference_pb2.ChatPrompt, message: Message, place: str) -> None:
    """Write a message. Its fields that are None ask for nothing, such as those of an answer of OpenAI's client."""
    if not isinstance(message, Mapping):
        raise InvalidRequest("must be a message with role and content", field=place)
    known = {"role", "content", "name", "tool_call_id", "tool_calls", "reasoning"}
    for name, value in message.items():
        if name not in known and value is not None:
            raise InvalidRequest("is no field of a message", field=f"{place}.{name}")
    plain = {name: value for name, value in message.items() if name in known - {"tool_calls"} and value is not None}
    if isinstance(plain.get("content"), list | tuple):  # joined with line ends, as over HTTP and in vLLM
        parts = [_part(part, f"{place}.content[{i}]") for i, part in enumerate(plain["content"])]
        plain["content"] = "\n".join(parts)
    wire = _filled(chat.messages.add(), plain, under=f"{place}.")
    for call in message.get("tool_calls") or ():
        try:
            function = call["function"]
            wire.tool_calls.add(id=call.get("id", ""), name=function["name"], arguments=function["arguments"])
        except (KeyError, TypeError, ValueError, AttributeError):
            wanted = 'be {"id": ..., "function": {"name": ..., "arguments": JSON text}}'
            raise InvalidRequest(f"must {wanted}", field=f"{place}.tool_calls") from None


def _part(part: Any, place: str) -> str:
    """Return the text of a part of a message."""
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise InvalidRequest('must be {"type": "text", "text": ...}; no other kind of content is supported', field=place)
    for name in part:
        if name not in ("type", "text"):
            raise InvalidRequest("is no field of a text", field=f"{place}.{name}")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest("must be a text", field=f"{place}.text")
    return str(part["text"])


def _choose(wire: inference_pb2.ToolChoice, choice: str | Mapping[str, Any]) -> None:
    try:
        if isinstance(choice, str):
            wire.mode = _MODES[choice]
        else:
            wire.function = choice["function"]["name"]
    except (KeyError, TypeError):
        raise InvalidRequest("must be auto, none, required, or name a function", field="tool_choice") from None


def _filled(message: _Wire, values: Mapping[str, Any], *, named: str = "", under: str = "") -> _Wire:
    """Set fields of a message, and return it. Raises `InvalidRequest` for a value that its field cannot hold. The error calls
    the field `named`, or by its name after `under`."""
    for name, value in values.items():
        try:
            kind = type(message)(**{name: value})
        except (TypeError, ValueError, AttributeError):
            wanted = _wanted(message.DESCRIPTOR.fields_by_name[name])
            raise InvalidRequest(f"must be {wanted}, got {value!r:.100}", field=named or under + name) from None
        message.MergeFrom(kind)
    return message


def _wanted(field: Any) -> str:
    """Describe what a field of a message can hold. field: its descriptor."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = (_wanted(field.message_type.fields_by_name[name]) for name in ("key", "value"))
        return f"an object with {key} as each key and {value} as its value"
    kind = _KINDS.get(field.cpp_type, "an object")
    return f"a list, of which each item is {kind}" if field.is_repeated else kind
