"""The tools of a chat, the choice among them, and what its template gets beside messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from pdserve.text.plain_json import obstacle
from router.api.request import ChatMessage, ChatPrompt, Prompt, Tool, ToolCall, ToolChoice, ToolMode
from router.openai.body import EMPTY, NULL, ChatBody, FunctionFields, Message, MessageCall, ToolFields
from router.openai.json import decode, refuse, show
from router.openai.names import EFFORT

MAX_TOOLS: Final = 128  # OpenAI's limit, for definitions and for the calls of a message
MAX_TOOLS_BYTES: Final = 256 << 10
MAX_VARIABLES_BYTES: Final = 16 << 10
MAX_VARIABLES: Final = 32
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_TOOL: Final = msgspec.json.Decoder(ToolFields)
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ANY: Final = msgspec.json.Decoder(dict[str, Any])
_TEXT: Final = msgspec.json.Decoder(str)
_CALLS: Final = msgspec.json.Decoder(list[MessageCall])
_NOTHING: Final = (bytes(NULL), *map(msgspec.json.encode, EMPTY))
"""Clients send an answer's message back with such values in fields that it did not use."""
_FUNCTION: Final = msgspec.json.Decoder(FunctionFields)
_NO_EFFORT: Final = "none"


def read_chat(body: ChatBody, read_messages: Callable[[], tuple[ChatMessage, ...]]) -> Prompt:
    """Return the prompt of a chat. Raises `InvalidRequest` naming the field."""
    tools = read_tools([bytes(raw) for raw in body.tools or ()])
    variables = _variables(body)
    messages = read_messages()
    opens = body.add_generation_prompt is not False
    goes_on = body.continue_final_message or False
    if goes_on:
        if messages[-1].role != "assistant":
            raise refuse("continue_final_message", "is only allowed if the last message is the assistant's")
        if body.add_generation_prompt:
            raise refuse("add_generation_prompt", "must be false beside continue_final_message")
        opens = False
    if not tools and not variables and opens:
        return messages
    return ChatPrompt(messages, tools, variables, add_generation_prompt=opens, continue_final_message=goes_on)


def read_tools(tools: Sequence[bytes]) -> tuple[Tool, ...]:
    """Return the tools, each of which is given as JSON. Raises `InvalidRequest` naming the field."""
    if len(tools) > MAX_TOOLS:
        raise refuse("tools", f"holds {len(tools)} tools; at most {MAX_TOOLS} are allowed")
    if (size := sum(map(len, tools))) > MAX_TOOLS_BYTES:
        raise refuse("tools", f"has {size} bytes; at most {MAX_TOOLS_BYTES} are allowed")
    read = tuple(_tool(text, f"tools[{i}]") for i, text in enumerate(tools))
    names = [tool.name for tool in read]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise refuse(f"tools[{i}].function.name", f"{show(name)} is there twice")
    return read


def read_tool_choice(body: ChatBody) -> ToolChoice:
    """Return the calls that the request may make. Raises `InvalidRequest` naming the field."""
    parallel = body.parallel_tool_calls is not False
    chosen = body.tool_choice
    if chosen is None:
        return ToolChoice(parallel=parallel)
    if isinstance(chosen, str):
        if chosen not in [mode.value for mode in ToolMode]:
            raise refuse("tool_choice", f"must be none, auto, required or a function, got {show(chosen)}")
        return ToolChoice(ToolMode(chosen), parallel=parallel)
    if "type" not in chosen or decode(bytes(chosen["type"]), _TEXT, "tool_choice.type") != "function":
        raise refuse("tool_choice", "must have the type 'function'")
    if "function" not in chosen:
        raise refuse("tool_choice.function", "is missing")
    function = decode(bytes(chosen["function"]), _FUNCTION, "tool_choice.function").name
    if not function:
        raise refuse("tool_choice.function.name", "is empty")
    return ToolChoice(function=function, parallel=parallel)


def read_variables(text: bytes, field: str) -> str:
    """Return a JSON object of variables as it is, if it is one and not too large. Raises `InvalidRequest`."""
    if len(text) > MAX_VARIABLES_BYTES:
        raise refuse(field, f"has {len(text)} bytes; at most {MAX_VARIABLES_BYTES} are allowed")
    values = decode(text, _ANY, field)
    _check_plain(values, field)
    if len(values) > MAX_VARIABLES:
        raise refuse(field, f"has {len(values)} variables; at most {MAX_VARIABLES} are allowed")
    return text.decode() if values else ""


def message_calls(message: Message, field: str) -> tuple[ToolCall, ...]:
    """Return the calls of an assistant's message. Raises `InvalidRequest` naming the field."""
    if bytes(message.tool_calls) in _NOTHING:
        return ()
    calls = decode(bytes(message.tool_calls), _CALLS, f"{field}.tool_calls")
    if calls and message.role != "assistant":
        raise refuse(f"{field}.tool_calls", "is only allowed in a message of the assistant")
    if len(calls) > MAX_TOOLS:
        raise refuse(f"{field}.tool_calls", f"holds {len(calls)} calls; at most {MAX_TOOLS} are allowed")
    return tuple(_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls))


def decode_object(text: bytes, field: str) -> dict[str, Any]:
    """Return the JSON object in a text. Raises `InvalidRequest` naming the field, for anything else."""
    try:
        values: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise refuse(field, "must be the text of a JSON object") from exc
    _check_plain(values, field)
    return values


def _check_plain(values: Any, field: str) -> None:
    if why := obstacle(values):
        raise refuse(field, why)


def _call(call: MessageCall, field: str) -> ToolCall:
    if call.type not in (None, "function"):
        raise refuse(f"{field}.type", f"must be 'function', got {show(call.type)}")
    given = call.function.arguments
    text = given if isinstance(given, str) else "{}" if given is None else msgspec.json.encode(given).decode()
    return ToolCall(call.id or "", call.function.name, text or "{}")


def _tool(text: bytes, field: str) -> Tool:
    fields = decode(text, _TOOL, field)
    if fields.type != "function":
        raise refuse(f"{field}.type", f"{show(fields.type)} is not supported; only 'function' is")
    if (function := fields.function) is None:
        raise refuse(f"{field}.function", "is missing")
    if not _NAME.fullmatch(function.name):
        raise refuse(f"{field}.function.name", f"must be 1 to 64 letters, digits, _, - or ., got {show(function.name)}")
    parameters = _parameters(function.parameters, f"{field}.function.parameters")
    return Tool(function.name, function.description or "", parameters, function.strict or False)


def _parameters(raw: msgspec.Raw, field: str) -> str:
    """Return a schema as text. Only objects can be arguments."""
    if raw == NULL:
        return ""
    kind = decode_object(bytes(raw), field).get("type", "object")
    if kind != "object":
        raise refuse(f"{field}.type", f"must be 'object', got {show(kind)}")
    return bytes(raw).decode()


def _variables(body: ChatBody) -> str:
    """Return the variables of the template. `reasoning_effort` is one of them."""
    raw = body.chat_template_kwargs
    text = "" if raw == NULL else read_variables(bytes(raw), "chat_template_kwargs")
    if body.reasoning_effort in (None, _NO_EFFORT):
        return text
    given = decode(text.encode(), _OBJECT) if text else {}
    if EFFORT in given:
        raise refuse(EFFORT, "is not allowed beside the variable of the same name")
    return msgspec.json.encode({**given, EFFORT: body.reasoning_effort}).decode()
