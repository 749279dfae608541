"""The fields of tools: what they become, and what is refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pdserve.core.errors import InvalidRequest
from pdserve.rpc.v1 import inference_pb2
from router.api.request import ChatMessage, ChatPrompt, GenerateInput, Tool, ToolCall, ToolChoice, ToolMode
from router.openai.prompt import MAX_TOOLS, MAX_TOOLS_BYTES, MAX_VARIABLES_BYTES
from router.openai.request import parse_chat
from router.parsing.generate import generate_input

HI = [{"role": "user", "content": "Hi"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather now", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}


def chat(**fields: Any) -> GenerateInput:
    return parse_chat(json.dumps({"messages": HI, **fields}).encode(), None).inputs[0]


def grpc(chat: inference_pb2.ChatPrompt, **fields: Any) -> GenerateInput:
    message = inference_pb2.GenerateRequest(chat=chat, **fields)
    return generate_input(message, call_remaining_s=None, max_deadline_s=9.0, max_prompt_tokens=99)


def test_tools_and_messages_become_the_same_on_both_apis() -> None:
    talk: list[dict[str, Any]] = [
        *HI,
        {"role": "assistant", "content": None, "reasoning_content": "Hm", "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": ""}},
            {"id": "call_2", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
        ]},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1", "name": "now"},
    ]  # fmt: skip
    by_http = chat(messages=talk, tools=[WEATHER, NOW], chat_template_kwargs={"enable_thinking": False}).prompt
    assert isinstance(by_http, ChatPrompt)
    assert by_http.messages == (
        ChatMessage("user", "Hi"),
        ChatMessage(
            "assistant", None, (ToolCall("call_1", "now", "{}"), ToolCall("call_2", "get_weather", '{"city": "Rome"}')),
            reasoning="Hm",
        ),
        ChatMessage("tool", "12:00", (), "call_1", "now"),
    )  # fmt: skip
    assert by_http.tools == (Tool("get_weather", "Weather now", json.dumps(CITY)), Tool("now"))
    made = inference_pb2.ChatPrompt(tools=[json.dumps(WEATHER), json.dumps(NOW)], template_kwargs='{"enable_thinking": false}')
    made.messages.add(role="user", content="Hi")
    called = made.messages.add(role="assistant", reasoning="Hm")
    called.tool_calls.add(id="call_1", name="now")
    called.tool_calls.add(id="call_2", name="get_weather", arguments='{"city": "Rome"}')
    made.messages.add(role="tool", content="12:00", tool_call_id="call_1", name="now")
    assert grpc(made).prompt == by_http


def test_the_choice_of_calls() -> None:
    assert chat(tools=[NOW]).tool_choice == ToolChoice()
    assert chat(tools=[NOW], tool_choice="required", parallel_tool_calls=False).tool_choice == ToolChoice(
        ToolMode.REQUIRED, parallel=False
    )
    named = {"type": "function", "function": {"name": "now"}}
    assert chat(tools=[NOW], tool_choice=named).tool_choice == ToolChoice(function="now")
    prompt = inference_pb2.ChatPrompt(tools=[json.dumps(NOW)])
    prompt.messages.add(role="user", content="Hi")
    choice = inference_pb2.ToolChoice
    assert grpc(prompt).tool_choice == ToolChoice()
    assert grpc(prompt, tool_choice=choice(function="now", at_most_one=True)).tool_choice == ToolChoice(
        function="now", parallel=False
    )
    assert grpc(prompt, tool_choice=choice(mode="MODE_NONE")).tool_choice == ToolChoice(ToolMode.NONE)
    for bad in (choice(function="now", mode="MODE_REQUIRED"), choice(mode=9)):
        with pytest.raises(InvalidRequest, match=r"^tool_choice\.mode"):
            grpc(prompt, tool_choice=bad)


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def nested(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for _ in range(levels):
        made = {"x": [made]}
    return made


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": [NOW] * (MAX_TOOLS + 1)}),
    ("tools", {"tools": [function(description="x" * MAX_TOOLS_BYTES)]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools[0].type", {"tools": [{}]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tools[0].function.name", {"tools": [function(name="a b")]}),
    ("tools[0].function.name", {"tools": [function(name="")]}),
    ("tools[1].function.name", {"tools": [NOW, NOW]}),
    ("tools[0].function.parameters", {"tools": [function(parameters=[])]}),
    ("tools[0].function.parameters", {"tools": [function(parameters="{}")]}),
    ("tools[0].function.parameters.type", {"tools": [function(parameters={"type": "array"})]}),
    ("tools[0].function.parameters", {"tools": [function(parameters=nested(70))]}),
    ("tools[0].function.parameters", {"tools": [function(parameters={"maximum": 10**30})]}),
    ("chat_template_kwargs", {"chat_template_kwargs": nested(70)}),
    ("tool_choice", {"tools": [NOW], "tool_choice": "any"}),
    ("tool_choice", {"tools": [NOW], "tool_choice": {"type": "allowed_tools"}}),
    ("tool_choice.function", {"tools": [NOW], "tool_choice": {"type": "function"}}),
    ("tool_choice.function.name", {"tools": [NOW], "tool_choice": {"type": "function", "function": {}}}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("function_call", {"function_call": {"name": "f"}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"x": "y" * MAX_VARIABLES_BYTES}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {str(i): 1 for i in range(40)}}),
    ("reasoning_effort", {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}),
    ("continue_final_message", {"continue_final_message": True}),
    ("add_generation_prompt", {
        "continue_final_message": True, "add_generation_prompt": True, "messages": [{"role": "assistant", "content": "x"}],
    }),
]  # fmt: skip


@pytest.mark.parametrize(("field", "fields"), REFUSED)
def test_bad_tools_name_their_place(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.field == field
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("field", "fields"),
    [("tools[1]", {"tools": [json.dumps(NOW), "{"]}), ("template_kwargs", {"template_kwargs": '{"a": NaN}'})],
)
def test_a_field_of_grpc_that_is_no_json_is_named(field: str, fields: dict[str, Any]) -> None:
    prompt = inference_pb2.ChatPrompt(**fields)
    prompt.messages.add(role="user", content="Hi")
    with pytest.raises(InvalidRequest, match=rf"^{re.escape(field)}: is not valid JSON") as caught:
        grpc(prompt)
    assert caught.value.field == field


def test_the_effort_of_reasoning_is_a_variable_of_the_template() -> None:
    prompt = chat(reasoning_effort="low", chat_template_kwargs={"a": 1}).prompt
    assert isinstance(prompt, ChatPrompt)
    assert json.loads(prompt.variables) == {"a": 1, "reasoning_effort": "low"}
    assert chat(reasoning_effort="none", chat_template_kwargs={}).prompt == (ChatMessage("user", "Hi"),)
