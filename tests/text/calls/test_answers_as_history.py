"""What the router answers is a valid message when it comes back, whatever the model wrote and wherever it was cut off."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_call_parsers import NAMES, TEXTS, WRITERS
from test_family_tools import FAMILIES, TOKENS, TOOLS

from pdserve.core.errors import InvalidRequest
from pdserve.core.report import Report
from pdserve.core.sampling import FinishReason, Placement
from pdserve.text.calls.events import EventParser
from pdserve.text.calls.forms import RequiredCalls
from pdserve.text.calls.output import NamedCall, OutputParser
from pdserve.text.calls.reasoning import ReasoningParser
from pdserve.text.calls.registry import CALL_FORMS
from pdserve.text.chat import ChatTemplate
from router.api.answer import Delta
from router.api.request import ChatMessage, ChatPrompt, Tool, ToolCall
from router.openai.chunks import GatheredCall
from router.openai.request import parse_chat
from router.openai.responses.events import ResponseWriter
from router.openai.responses.request import parse_responses
from router.service.buffered_generation import BufferedGeneration
from router.service.chats import ParsedGeneration
from router.service.prompts import chat_chars, chat_text

ASKED: dict[str, Any] = {"role": "user", "content": "Go"}
REPORT = Report(Placement.COLOCATED, "", 1, 2)
CHOICES = st.sampled_from(["auto", "required", "f"])


@cache
def template_of(form: str) -> ChatTemplate:
    return ChatTemplate(FAMILIES[form][0], TOKENS)


def parser_of(form: str, choice: str, *, opened: bool) -> EventParser:
    if choice == "f":
        return OutputParser(None, NamedCall("f"))
    if choice == "required":
        return OutputParser(None, RequiredCalls(NAMES))
    return OutputParser(ReasoningParser(opened=opened), CALL_FORMS[form].machine(NAMES))


async def deltas_of(parser: EventParser, text: str) -> list[Delta]:
    inner = BufferedGeneration("r", (1,), lambda _: None)
    ids = iter("123456789")
    generation = ParsedGeneration(inner, parser, lambda: "abcdefgh" + next(ids, "0"))
    inner.push(Delta(0, (1,), text[: len(text) // 2], None))
    inner.push(Delta(1, (1,), text[len(text) // 2 :], FinishReason.LENGTH))
    inner.end(REPORT, None)
    return [delta async for delta in generation]


def message_of(deltas: list[Delta]) -> dict[str, Any]:
    """Return the message of a chat's whole answer, with the fields that OpenAI's client adds when it sends one back."""
    gathered = GatheredCall()
    for delta in deltas:
        gathered.add(delta)
    told: dict[str, Any] = {"role": "assistant", "content": "".join(delta.text for delta in deltas)}
    made: dict[str, Any] = gathered.into({"message": told})["message"]
    return {"refusal": None, "annotations": None, "audio": None, "function_call": None, **made}


def items_of(deltas: list[Delta]) -> list[Any]:
    """Return the items of an answer of `/v1/responses`."""
    writer = ResponseWriter(parse_responses(b'{"input": "Go"}', None), "m")
    for delta in deltas:
        writer.delta(delta, b"")
    output: list[Any] = json.loads(writer.whole(FinishReason.LENGTH, REPORT))["output"]
    return output


@given(form=st.sampled_from(list(FAMILIES)), text=TEXTS, opened=st.booleans(), choice=CHOICES)
@example(form="hermes", text="Let me th", opened=True, choice="auto")
@example(form="hermes", text="", opened=False, choice="auto")
@example(form="pythonic", text='[{"name": "f", "parameters": {"city": "Os', opened=False, choice="required")
@example(form="hermes", text='[{"name": "f", "parameters": {"a": "\\ud800"}}]', opened=False, choice="required")
@example(form="hermes", text=WRITERS["hermes"][1]([("f", {"n": 10**40})]), opened=False, choice="auto")
def test_every_answer_is_a_valid_history(form: str, text: str, opened: bool, choice: str) -> None:
    deltas = asyncio.run(deltas_of(parser_of(form, choice, opened=opened), text))
    message = message_of(deltas)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in message.get("tool_calls", ())]
    tools = {"tools": TOOLS}
    prompt = parse_chat(json.dumps({"messages": [ASKED, message, *results, ASKED], **tools}).encode(), None).inputs[0].prompt
    assert isinstance(prompt, ChatPrompt)
    chat_text(template_of(form), prompt)

    items = items_of(deltas)
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "1"}
        for item in items
        if item["type"] == "function_call"
    ]
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    body = {"input": [ASKED, *items, *outputs, ASKED], "tools": flat}
    again = parse_responses(json.dumps(body).encode(), None).call.inputs[0].prompt
    assert isinstance(again, ChatPrompt)
    chat_text(template_of(form), again)


CUT = '{"city": "Os'


def shown(template: str, arguments: str) -> str:
    message = ChatMessage("assistant", None, (ToolCall("a", "f", arguments),))
    return chat_text(ChatTemplate(template, {}), ChatPrompt((message,)))


@pytest.mark.parametrize("arguments", [CUT, "[1]", "oops", '{"a": 1e999}', '{"a": ' + "[" * 90 + "]" * 90 + "}"])
def test_arguments_that_are_no_object_are_shown_as_they_are(arguments: str) -> None:
    as_text = "{% for call in messages[0].tool_calls %}{{ call.function.arguments }}{% endfor %}"
    by_name = """{% for call in messages[0].tool_calls %}{% for key, value in call.function.arguments.items() %}
    {{- key }}={{ value }}{% endfor %}{% endfor %}"""
    filtered = by_name.replace(".items()", " | items")
    assert shown(as_text, arguments) == arguments
    assert [shown(source, arguments) for source in (by_name, filtered)] == [f"arguments={arguments}"] * 2


def test_a_template_that_refuses_a_message_for_another_reason_says_so() -> None:
    refuses = "{{ messages[0].tool_calls and raise_exception('no calls here') }}"
    for arguments in (CUT, "{}"):
        with pytest.raises(InvalidRequest, match="no calls here"):
            shown(refuses, arguments)


def test_an_assistant_may_have_said_nothing() -> None:
    for said in ({}, {"content": None}, {"content": ""}, {"content": None, "reasoning": "Hm"}, {"content": []}):
        body = json.dumps({"messages": [ASKED, {"role": "assistant", **said}]})
        messages: Any = parse_chat(body.encode(), None).inputs[0].prompt
        assert messages[1].content == ""


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
TOLD = """You may call functions. Each line describes one, with the JSON schema of its parameters:
{"name": "f", "parameters": {"type": "object"}}
Calls are written as a JSON list: [{"name": ..., "parameters": {...}}]"""


def test_a_template_that_shows_no_tools_gets_them_told() -> None:
    called = ChatMessage("assistant", "Wait.", (ToolCall("a", "f", "{}"), ToolCall("b", "f", CUT)))
    talk = (ChatMessage("user", "Go"), called, ChatMessage("tool", "21", call_id="a"))
    chat = ChatPrompt(talk, (Tool("f", parameters='{"type": "object"}'),))
    rest = f"""[assistant]Wait.
[{{"name": "f", "parameters": {{}}}}, {{"name": "f", "parameters": {CUT}}}]
[user]Result of f: 21
"""
    assert chat_text(ChatTemplate(PLAIN, {}), chat) == f"[system]{TOLD}\n[user]Go\n{rest}"
    assert chat_text(ChatTemplate(NO_SYSTEM, {}), chat) == f"[user]{TOLD}\n\nGo\n{rest}"
    with_system = ChatPrompt((ChatMessage("system", "Be kind."), *talk), chat.tools)
    assert chat_text(ChatTemplate(PLAIN, {}), with_system) == f"[system]{TOLD}\n\nBe kind.\n[user]Go\n{rest}"
    assert chat_text(ChatTemplate(PLAIN, {}), ChatPrompt(talk)) == f"[user]Go\n{rest}"
    with pytest.raises(InvalidRequest, match="no system"):
        chat_text(ChatTemplate(NO_SYSTEM, {}), with_system)


@pytest.mark.parametrize(
    "message",
    [
        ChatMessage("assistant", None, (ToolCall("c", "f" * 99, "{}"),)),
        ChatMessage("assistant", None, (ToolCall("c" * 99, "f", "{}"),)),
        ChatMessage("tool", "4", call_id="c" * 99),
        ChatMessage("user", "Hi", name="n" * 99),
    ],
)
def test_a_long_name_or_id_counts_as_text_that_takes_time_to_render(message: ChatMessage) -> None:
    """Only contents and arguments counted, so a name of megabytes was rendered on the loop."""
    assert chat_chars(ChatPrompt((message,))) >= 99
