"""The body of `/v1/responses` becomes a chat. Errors name its fields as the client wrote them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from pdserve.core.errors import InvalidRequest
from pdserve.core.limits import MAX_MESSAGES
from pdserve.core.sampling import SamplingParams
from router.openai.body import ChatBody, JsonSchema, ResponseFormat
from router.openai.json import (
    NOTHING,
    Ignored,
    decode,
    decode_body,
    encode_json,
    joined,
    left_out,
    refuse,
    refuse_unsupported,
    show,
)
from router.openai.prompt import MAX_TOOLS
from router.openai.request import NO_HEADERS, SCHEMA, Call, ClassHeaders, chat_call, formats_left_out
from router.openai.responses.body import (
    LOGPROBS,
    NEVER_INCLUDED,
    SHARED,
    FunctionChoice,
    FunctionTool,
    ItemKind,
    ResponsesBody,
    TextFormat,
)
from router.openai.responses.items import ResponseTurns
from router.openai.responses.names import ResponseNames

MAX_METADATA: Final = 16  # OpenAI's limits: pairs, and characters of a key and of a value
MAX_KEY_CHARS: Final = 64
MAX_VALUE_CHARS: Final = 512
TEXT_SCHEMA: Final = "text.format.schema"
_BODY: Final = msgspec.json.Decoder(ResponsesBody)
_KIND: Final = msgspec.json.Decoder(ItemKind)
_TOOL: Final = msgspec.json.Decoder(FunctionTool)
_CHOICE: Final = msgspec.json.Decoder(FunctionChoice)
_VALUE: Final = msgspec.json.Decoder()
_DEFAULTS: Final = SamplingParams()


@dataclass(frozen=True, slots=True)
class ResponsesCall:
    """One request of `/v1/responses`: a chat of one choice, and what its answer repeats."""

    call: Call
    ignored: Ignored
    repeated: bytes
    """The fields of the answer that are those of the request, as members of a JSON object."""
    logprobs: bool
    names: ResponseNames

    @property
    def request_id(self) -> str:
        """The router's own unique id of the request."""
        return self.call.request_id

    @property
    def correlation_id(self) -> str:
        """The client's name for the request."""
        return self.call.correlation_id

    def of_client(self, client: tuple[str, ...]) -> ResponsesCall:
        """Return the call with the names of its client."""
        return replace(self, call=self.call.of_client(client))


def parse_responses(body: bytes, header_id: str | None, headers: ClassHeaders = NO_HEADERS) -> ResponsesCall:
    """Parse a body of `/v1/responses`. Raises `InvalidRequest` naming the field."""
    fields, ignored = decode_body(body, _BODY)
    parts = [ignored, refuse_unsupported(fields)]
    if fields.stream_options is not None:
        parts.append(refuse_unsupported(fields.stream_options, "stream_options"))
        if not fields.stream:
            raise refuse("stream_options", "is only allowed with stream: true")
    logprobs, hints = _included(fields)
    turns = _turns(fields)
    tools, unknown_in_tools = _tools(fields.tools or [])
    choice, unknown = _chats_choice(fields.tool_choice)
    if fields.text is not None:
        parts.append(refuse_unsupported(fields.text, "text"))
    effort = None
    if fields.reasoning is not None:
        parts.append(refuse_unsupported(fields.reasoning, "reasoning"))
        effort = fields.reasoning.effort
    chat = ChatBody(
        messages=turns.messages,
        max_completion_tokens=fields.max_output_tokens,
        logprobs=logprobs or None,
        top_logprobs=fields.top_logprobs if logprobs else None,
        response_format=None if fields.text is None else _format(fields.text.format),
        tools=[_chats_tool(tool) for tool in tools] or None,
        tool_choice=choice,
        reasoning_effort=effort,
        **{name: getattr(fields, name) for name in SHARED},
    )
    _check_metadata(fields.metadata or {})
    names = turns.names(formatted=chat.response_format is not None)
    try:
        call = chat_call(chat, header_id, headers)
    except InvalidRequest as exc:
        raise names.renamed(exc) from exc
    formats = formats_left_out(call.inputs[0], TEXT_SCHEMA if names.formatted else SCHEMA, "tools[].parameters")
    parts += [hints, *turns.left_out, *unknown_in_tools, unknown, call.ignored, formats]
    return ResponsesCall(call, joined(parts), _repeated(fields, tools), logprobs, names)


def _included(fields: ResponsesBody) -> tuple[bool, Ignored]:
    """Return True if the answer includes log-probabilities, and the entries of `include` that are hints."""
    entries = fields.include or []
    for i, entry in enumerate(entries):
        if entry != LOGPROBS and entry not in NEVER_INCLUDED:
            raise refuse(f"include[{i}]", f"{show(entry)} is not supported; only {LOGPROBS!r} is")
    if fields.top_logprobs and LOGPROBS not in entries:
        raise refuse("top_logprobs", f"is only allowed with {LOGPROBS!r} in include")
    return LOGPROBS in entries, left_out("include", [entry for entry in entries if entry != LOGPROBS])


def _turns(fields: ResponsesBody) -> ResponseTurns:
    """Return the messages of the chat."""
    turns = ResponseTurns()
    if fields.instructions is not None:
        turns.say("system", fields.instructions, "instructions")
    if fields.input is None:
        raise refuse("input", "is missing")
    if isinstance(fields.input, str):
        turns.say("user", fields.input, "input")
        return turns
    if not fields.input:
        raise refuse("input", "must hold at least one item")
    most = MAX_MESSAGES - (fields.instructions is not None)
    if len(fields.input) > most:
        raise refuse("input", f"holds {len(fields.input)} items; at most {most} are allowed")
    for i, raw in enumerate(fields.input):
        turns.add(bytes(raw), f"input[{i}]")
    return turns


def _tools(raws: list[msgspec.Raw]) -> tuple[list[FunctionTool], list[Ignored]]:
    """Return the tools, and the fields of each that were left out."""
    if len(raws) > MAX_TOOLS:
        raise refuse("tools", f"holds {len(raws)} tools; at most {MAX_TOOLS} are allowed")
    tools, left_out = [], []
    for i, raw in enumerate(raws):
        place = f"tools[{i}]"
        kind = decode(bytes(raw), _KIND, place).type
        if kind != "function":
            raise refuse(f"{place}.type", f"{show(kind)} is not supported; only 'function' is")
        tool, ignored = decode_body(bytes(raw), _TOOL, place)
        refuse_unsupported(tool, place)
        if tool.name is None:
            raise refuse(f"{place}.name", "is missing")
        tools.append(tool)
        left_out.append(ignored)
    return tools, left_out


def _chats_tool(tool: FunctionTool) -> msgspec.Raw:
    """Return a tool as a chat writes it."""
    function = {name: getattr(tool, name) for name in ("name", "description", "parameters", "strict")}
    return msgspec.Raw(msgspec.json.encode({"type": "function", "function": function}))


def _chats_choice(choice: str | dict[str, msgspec.Raw] | None) -> tuple[str | dict[str, msgspec.Raw] | None, Ignored]:
    """Return the choice of tools as a chat writes it, and the fields that were left out."""
    if not isinstance(choice, dict):
        return choice, NOTHING
    chosen, ignored = decode_body(msgspec.json.encode(choice), _CHOICE, "tool_choice")
    if chosen.type != "function":
        raise refuse("tool_choice.type", f"{show(chosen.type)} is not supported; only 'function' is")
    if chosen.name is None:
        raise refuse("tool_choice.name", "is missing")
    function = msgspec.Raw(msgspec.json.encode({"name": chosen.name}))
    return {"type": msgspec.Raw(b'"function"'), "function": function}, ignored


def _format(form: TextFormat | None) -> ResponseFormat | None:
    """Return the form of the text as a chat writes it."""
    if form is None:
        return None
    if form.type != "json_schema":
        if bytes(form.schema) != b"null":
            raise refuse(TEXT_SCHEMA, "is only allowed with type json_schema")
        return ResponseFormat(form.type)
    return ResponseFormat("json_schema", JsonSchema(form.schema))


def _check_metadata(metadata: dict[str, str]) -> None:
    if len(metadata) > MAX_METADATA:
        raise refuse("metadata", f"holds {len(metadata)} pairs; at most {MAX_METADATA} are allowed")
    for key, value in metadata.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            field = f'metadata["{show(key)[1:-1]}"]'
            raise refuse(field, f"allows {MAX_KEY_CHARS} characters of a key and {MAX_VALUE_CHARS} of a value")


def _repeated(fields: ResponsesBody, tools: list[FunctionTool]) -> bytes:
    """Return the members of the answer that repeat the request. Where the client gave no value, it is the default."""
    form: dict[str, Any] = {"type": "text"}
    if fields.text is not None and fields.text.format is not None:
        own = fields.text.format
        form = {name: value for name in ("type", "name", "description", "strict") if (value := getattr(own, name)) is not None}
        if own.type == "json_schema":
            form["schema"] = decode(bytes(own.schema), _VALUE, TEXT_SCHEMA)
    values: dict[str, Any] = {
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "prompt_cache_key": fields.prompt_cache_key,
        "safety_identifier": fields.safety_identifier,
        "temperature": _DEFAULTS.temperature if fields.temperature is None else fields.temperature,
        "text": {"format": form},
        "reasoning": {"effort": fields.reasoning.effort if fields.reasoning else None, "summary": None},
        "tool_choice": _told_choice(fields.tool_choice),
        "tools": [_told_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)],
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": _DEFAULTS.top_p if fields.top_p is None else fields.top_p,
        "user": fields.user,
    }
    try:
        return encode_json(values)[1:-1]
    except RecursionError as exc:
        raise refuse("body", "is nested too deeply") from exc


def _told_choice(choice: str | dict[str, msgspec.Raw] | None) -> Any:
    if choice is None:
        return "auto"
    return choice if isinstance(choice, str) else decode(msgspec.json.encode(choice), _VALUE, "tool_choice")


def _told_tool(tool: FunctionTool, place: str) -> dict[str, Any]:
    parameters = decode(bytes(tool.parameters), _VALUE, f"{place}.parameters")
    told = {"type": "function", "name": tool.name, "description": tool.description}
    return {**told, "parameters": parameters, "strict": tool.strict}
