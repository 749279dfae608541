"""The body of `/v1/responses` becomes a chat. Errors name its fields as the client wrote them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import MAX_MESSAGES
from pdserve.core.sampling import SamplingParams
from router.openai.body import ChatBody, JsonSchema, Message, ResponseFormat
from router.openai.errors import encode_json
from router.openai.ignored import Ignored, decode_body, joined
from router.openai.json import decode, refuse, show
from router.openai.prompt import MAX_PARTS
from router.openai.request import NO_HEADERS, Call, ClassHeaders, chat_call
from router.openai.responses.body import LOGPROBS, SHARED, ItemKind, MessageItem, ResponsesBody, TextOptions, TextPart
from router.openai.unsupported import refuse_unsupported

MAX_METADATA: Final = 16  # OpenAI's limits: pairs, and characters of a key and of a value
MAX_KEY_CHARS: Final = 64
MAX_VALUE_CHARS: Final = 512
_BODY: Final = msgspec.json.Decoder(ResponsesBody)
_KIND: Final = msgspec.json.Decoder(ItemKind)
_MESSAGE: Final = msgspec.json.Decoder(MessageItem)
_VALUE: Final = msgspec.json.Decoder()
_DEFAULTS: Final = SamplingParams()
_TEXT_TYPES: Final = ("input_text", "output_text")
_RENAMED: Final = {
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
_PLACE: Final = re.compile(r"messages\[([0-9]+)\]")


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """One request of `/v1/responses`: a chat of one choice, and what its answer repeats."""

    call: Call
    ignored: Ignored
    repeated: bytes
    """The fields of the answer that are those of the request, as members of a JSON object."""
    logprobs: bool

    @property
    def request_id(self) -> str:
        """The router's own unique id of the request."""
        return self.call.request_id

    @property
    def correlation_id(self) -> str:
        """The client's name for the request."""
        return self.call.correlation_id


def parse_responses(body: bytes, header_id: str | None, headers: ClassHeaders = NO_HEADERS) -> ResponsesCall:
    """Parse a body of `/v1/responses`. Raises `InvalidRequest` naming the field."""
    fields, ignored = decode_body(body, _BODY)
    refuse_unsupported(fields)
    if fields.stream_options is not None:
        refuse_unsupported(fields.stream_options, "stream_options.")
        if not fields.stream:
            raise refuse("stream_options", "is only allowed with stream: true")
    logprobs = _logprobs(fields)
    messages, places, left_out = _messages(fields)
    chat = ChatBody(
        messages=messages,
        max_completion_tokens=fields.max_output_tokens,
        logprobs=logprobs or None,
        top_logprobs=fields.top_logprobs if logprobs else None,
        response_format=_format(fields.text),
        **{name: getattr(fields, name) for name in SHARED},
    )
    _check_metadata(fields.metadata or {})
    try:
        call = chat_call(chat, header_id, headers)
    except InvalidRequest as exc:
        raise _renamed(exc, places) from exc
    return ResponsesCall(call, joined([ignored, *left_out]), _repeated(fields), logprobs)


def _logprobs(fields: ResponsesBody) -> bool:
    for i, entry in enumerate(fields.include or []):
        if entry != LOGPROBS:
            raise refuse(f"include[{i}]", f"{show(entry)} is not supported; only {LOGPROBS!r} is")
    if fields.top_logprobs and not fields.include:
        raise refuse("top_logprobs", f"is only allowed with {LOGPROBS!r} in include")
    return bool(fields.include)


def _messages(fields: ResponsesBody) -> tuple[list[Message], list[str], list[Ignored]]:
    """Return the messages of the chat, the name of each in the body, and the fields of each that were left out."""
    messages = [] if fields.instructions is None else [Message("system", fields.instructions)]
    places = ["instructions"] * len(messages)
    if fields.input is None:
        raise refuse("input", "is missing")
    if isinstance(fields.input, str):
        return [*messages, Message("user", fields.input)], [*places, "input"], []
    if not fields.input:
        raise refuse("input", "must hold at least one item")
    if len(fields.input) + len(messages) > MAX_MESSAGES:
        raise refuse("input", f"holds {len(fields.input)} items; at most {MAX_MESSAGES - len(messages)} are allowed")
    left_out = []
    for i, raw in enumerate(fields.input):
        place = f"input[{i}]"
        message, ignored = _item(bytes(raw), place)
        messages.append(message)
        places.append(place)
        left_out.append(ignored)
    return messages, places, left_out


def _item(data: bytes, place: str) -> tuple[Message, Ignored]:
    """Return an item of the input as a message. An item without a type is a message."""
    kind = decode(data, _KIND, place).type
    if kind is not None and kind != "message":
        raise refuse(f"{place}.type", f"{show(kind)} is not supported; only 'message' is")
    item, ignored = decode_body(data, _MESSAGE, place)
    refuse_unsupported(item, f"{place}.")
    content = item.content
    if isinstance(content, list):
        if len(content) > MAX_PARTS:
            raise refuse(f"{place}.content", f"has {len(content)} parts; at most {MAX_PARTS} are allowed")
        content = "\n".join(_text(part, f"{place}.content[{i}]") for i, part in enumerate(content))
    return Message(item.role, content), ignored


def _text(part: TextPart, place: str) -> str:
    if part.type not in _TEXT_TYPES:
        raise refuse(f"{place}.type", f"{show(part.type)} is not supported; only {' and '.join(_TEXT_TYPES)} are")
    refuse_unsupported(part, f"{place}.")
    if part.text is None:
        raise refuse(f"{place}.text", "is missing")
    return part.text


def _format(options: TextOptions | None) -> ResponseFormat | None:
    """Return the form of the text as a chat writes it."""
    if options is None:
        return None
    refuse_unsupported(options, "text.")
    form = options.format
    if form is None:
        return None
    if form.type != "json_schema":
        if bytes(form.schema) != b"null":
            raise refuse("text.format.schema", "is only allowed with type json_schema")
        return ResponseFormat(form.type)
    return ResponseFormat("json_schema", JsonSchema(form.schema))


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise refuse("metadata", f"holds {len(metadata)} pairs; at most {MAX_METADATA} are allowed")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            raise refuse("metadata", f"allows {MAX_KEY_CHARS} characters of a key and {MAX_VALUE_CHARS} of a value")


def _renamed(error: InvalidRequest, places: list[str]) -> InvalidRequest:
    """Return an error of the chat with the name that the field has in this body."""
    old = error.field
    new = _PLACE.sub(lambda found: places[int(found[1])], old)
    for chats, own in _RENAMED.items():
        if new == chats or new.startswith(f"{chats}."):
            new = own + new.removeprefix(chats)
            break
    if new == old:
        return error
    return InvalidRequest(f"{new}: {error.message.removeprefix(old).removeprefix(': ')}", field=new)


def _repeated(fields: ResponsesBody) -> bytes:
    """Return the members of the answer that repeat the request. Where the client gave no value, it is the default."""
    form: dict[str, Any] = {"type": "text"}
    if fields.text is not None and fields.text.format is not None:
        own = fields.text.format
        form = {name: value for name in ("type", "name", "description", "strict") if (value := getattr(own, name)) is not None}
        if own.type == "json_schema":
            form["schema"] = decode(bytes(own.schema), _VALUE, "text.format.schema")
    values: dict[str, Any] = {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "prompt_cache_key": fields.prompt_cache_key,
        "safety_identifier": fields.safety_identifier,
        "temperature": _DEFAULTS.temperature if fields.temperature is None else fields.temperature,
        "text": {"format": form},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": _DEFAULTS.top_p if fields.top_p is None else fields.top_p,
        "user": fields.user,
    }
    try:
        return encode_json(values)[1:-1]
    except RecursionError as exc:
        raise refuse("text.format.schema", "is nested too deeply") from exc
