"""The prompts of a request body: text, token ids, several of either, or a chat with its tools, the choice among them, and what
its template gets beside messages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from pdserve.core.errors import ContextOverflow
from pdserve.core.limits import MAX_MESSAGES
from pdserve.text.plain_json import obstacle
from router.api.request import ChatMessage, ChatPrompt, Prompt, Tool, ToolCall, ToolChoice, ToolMode
from router.openai.body import EMPTY, NULL, ChatBody, ContentPart, FunctionFields, Message, MessageCall, ToolFields
from router.openai.json import convert, decode, refuse, refuse_unsupported, show

MAX_PROMPTS: Final = 256  # in one body; each is a request of its own in the router's bounded queue
MAX_PARTS: Final = MAX_MESSAGES  # in one message
ANY_NUMBER: Final = 1 << 31
TOKEN_ID_LIMIT: Final = 1 << 32  # ids travel as uint32; the router checks them against the vocabulary

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""OpenAI renamed `system` to `developer`, but the models' templates know the old name."""


def read_prompts(value: str | list[Any] | None, max_tokens: int = ANY_NUMBER) -> tuple[Prompt, ...]:
    """Return the prompts, one for each choice of the answer. `prompt` is "text", [ids], ["text", ...] or [[ids], ...].

    A prompt of more than `max_tokens` ids is refused by its count, before the ids are looked at. Raises `InvalidRequest`.
    """
    if value is None:
        raise refuse("prompt", "is missing")
    if isinstance(value, str):
        return (value,)
    if not value:
        raise refuse("prompt", "must not be empty")
    if isinstance(value[0], int):
        return (_prompt_ids(value, "prompt", max_tokens),)
    if len(value) > MAX_PROMPTS:
        raise refuse("prompt", f"holds {len(value)} prompts; at most {MAX_PROMPTS} are allowed")
    if isinstance(value[0], str):
        return convert(value, tuple[str, ...], "prompt")
    lists = convert(value, list[list[Any]], "prompt")
    return tuple(_prompt_ids(ids, f"prompt[{i}]", max_tokens) for i, ids in enumerate(lists))


def _prompt_ids(values: list[Any], field: str, max_tokens: int) -> tuple[int, ...]:
    if not values:
        raise refuse(field, "must hold at least one token id")
    if len(values) > max_tokens:
        raise ContextOverflow.of_prompt(f"{len(values)} tokens", max_tokens + 1, field=field)
    return token_ids(convert(values, tuple[int, ...], field), field)


def token_ids(values: tuple[int, ...], field: str) -> tuple[int, ...]:
    """Return the same ids. Raises `InvalidRequest` unless each fits uint32."""
    if values and (min(values) < 0 or max(values) >= TOKEN_ID_LIMIT):
        i = next(i for i, value in enumerate(values) if not 0 <= value < TOKEN_ID_LIMIT)
        raise refuse(f"{field}[{i}]", f"must be from 0 to {TOKEN_ID_LIMIT - 1}, got {show(values[i])}")
    return values


def read_messages(messages: list[Message] | None) -> tuple[ChatMessage, ...]:
    """Return the messages of `messages`. Raises `InvalidRequest` unless there is at least one, each role is known to templates
    and each content is text."""
    if messages is None:
        raise refuse("messages", "is missing")
    if not messages:
        raise refuse("messages", "must hold at least one message")
    if len(messages) > MAX_MESSAGES:
        raise refuse("messages", f"holds {len(messages)} messages; at most {MAX_MESSAGES} are allowed")
    return tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))


def _message(message: Message, field: str) -> ChatMessage:
    if message.role not in _ROLES:
        raise refuse(f"{field}.role", f"must be one of {', '.join(_ROLES)}, got {show(message.role)}")
    refuse_unsupported(message, field)
    calls = message_calls(message, field)
    if message.refusal and message.role != "assistant":
        raise refuse(f"{field}.refusal", "is only allowed in a message of the assistant")
    said = message.content
    if said is None and message.role == "assistant":  # an answer of calls alone, or one that was cut before its text
        content = None if calls else ""
    else:
        content = _content(said, f"{field}.content")
    if message.role == "tool" and not message.tool_call_id:
        raise refuse(f"{field}.tool_call_id", "is missing")
    if message.role != "tool" and message.tool_call_id:
        raise refuse(f"{field}.tool_call_id", "is only allowed in a message of the role tool")
    reasoning = message.reasoning_content or message.reasoning or ""
    if reasoning and message.role != "assistant":
        raise refuse(f"{field}.reasoning_content", "is only allowed in a message of the assistant")
    if message.refusal:
        content = message.refusal if not content else f"{content}\n{message.refusal}"
    return ChatMessage(_ROLES[message.role], content, calls, message.tool_call_id or "", message.name or "", reasoning)


def _content(content: str | list[ContentPart] | None, field: str) -> str:
    """Return the text of a message. The texts of a list of parts are joined with line ends, as vLLM does."""
    if content is None:
        raise refuse(field, "is missing")
    if isinstance(content, str):
        return content
    if len(content) > MAX_PARTS:
        raise refuse(field, f"has {len(content)} parts; at most {MAX_PARTS} are allowed")
    return "\n".join(_text(part, f"{field}[{i}]") for i, part in enumerate(content))


def _text(part: ContentPart, field: str) -> str:
    """Return the text of a part. What a model once refused with is text of its answer, as in vLLM."""
    if part.type not in ("text", "refusal"):
        raise refuse(f"{field}.type", f"{show(part.type)} is not supported; only 'text' and 'refusal' are")
    refuse_unsupported(part, field)
    return text_or_refusal(part.type, part.text, part.refusal, field)


def text_or_refusal(kind: str, text: str | None, refusal: str | None, field: str) -> str:
    """Return the one of both that a part of this kind has. Raises `InvalidRequest` if it lacks it, or has the other one."""
    own, other, others_name = (text, refusal, "refusal") if kind == "text" else (refusal, text, "text")
    if own is None:
        raise refuse(f"{field}.{kind}", "is missing")
    if other:
        raise refuse(f"{field}.{others_name}", f"is not allowed in a part with a {kind}")
    return own


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
EFFORT: Final = "reasoning_effort"
"""A field of a chat, and the variable of the template that it becomes."""
_NO_EFFORT: Final = "none"


def read_chat(body: ChatBody) -> Prompt:
    """Return the prompt of a chat. Raises `InvalidRequest` naming the field."""
    tools = read_tools([bytes(raw) for raw in body.tools or ()])
    variables = _variables(body)
    messages = read_messages(body.messages)
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
