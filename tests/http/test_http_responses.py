"""`/v1/responses` by the public openai client: it is a chat in another form, and nothing of it is stored."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pydantic
import pytest
from http_fakes import MODEL, WORDS, FakeApi, served
from openai.types import responses as kinds
from openai.types.responses import response_create_params
from openai.types.responses.response_input_item_param import FunctionCallOutput
from openai.types.shared_params import Reasoning
from raw_http import connect, exchange, head, post, read_answer

from pdserve.core.errors import InvalidRequest, Overloaded, ReplicaLost
from pdserve.core.limits import MAX_MESSAGES
from pdserve.core.sampling import FinishReason
from pdserve.core.structured.constraint import ConstraintKind
from router.api.request import ChatMessage
from router.openai.request import parse_chat
from router.openai.responses.body import (
    CallItem,
    CallOutputItem,
    EventOptions,
    FunctionChoice,
    FunctionTool,
    MessageItem,
    ReasoningItem,
    ReasoningOptions,
    ResponsesBody,
    TextFormat,
    TextOptions,
    TextPart,
)
from router.openai.responses.request import parse_responses

RESPONSES = "/v1/responses"
INCLUDE: Any = ["message.output_text.logprobs"]


def client(base: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=60)


def asked(**fields: Any) -> Any:
    return parse_responses(json.dumps({"input": "hi", **fields}).encode(), None)


TOOL: dict[str, Any] = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
SAID: dict[str, Any] = {"role": "assistant", "content": "Let me look."}
CALLED: dict[str, Any] = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "c1", "output": "rain"}

VLLM = """
    request_id mm_processor_kwargs priority cache_salt enable_response_messages previous_input_messages structured_outputs top_k
    repetition_penalty seed stop ignore_eos skip_special_tokens include_stop_str_in_output vllm_xargs
"""
"""The fields that vLLM adds to OpenAI's `ResponsesRequest`."""


@pytest.mark.parametrize(
    ("shape", "documented"),
    [
        (ResponsesBody, [response_create_params.ResponseCreateParamsBase]),
        (EventOptions, [response_create_params.StreamOptions]),
        (TextOptions, [kinds.ResponseTextConfigParam]),
        (TextFormat, [kinds.ResponseFormatTextJSONSchemaConfigParam]),
        (ReasoningOptions, [Reasoning]),
        (FunctionChoice, [kinds.ToolChoiceFunctionParam]),
        (ReasoningItem, [kinds.ResponseReasoningItemParam]),
        (MessageItem, [kinds.EasyInputMessageParam, kinds.ResponseOutputMessageParam]),
        (CallItem, [kinds.ResponseFunctionToolCallParam]),
        (CallOutputItem, [FunctionCallOutput]),
        (FunctionTool, [kinds.FunctionToolParam]),
        (TextPart, [kinds.ResponseInputTextParam, kinds.ResponseOutputTextParam, kinds.ResponseOutputRefusalParam,
                    kinds.ResponseInputImageParam, kinds.ResponseInputFileParam]),
    ],
)  # fmt: skip
def test_no_documented_field_of_responses_is_left_out(shape: Any, documented: list[Any]) -> None:
    names = {name for kind in documented for name in kind.__annotations__}
    assert names
    assert names - {*shape.__struct_encode_fields__} == set()
    assert set(VLLM.split()) - {*ResponsesBody.__struct_fields__} == set()
    assert shape.__struct_config__.forbid_unknown_fields


def test_a_whole_response() -> None:
    async def run() -> None:
        api = FakeApi()
        async with served(api) as base, client(base) as c:
            answer = await c.responses.create(
                model=MODEL, input="Say hello", instructions="Be brief", max_output_tokens=3, temperature=0,
                metadata={"a": "b"}, extra_body={"top_k": -1, "seed": 7, "request_id": "mine", "deadline_s": 5},
            )  # fmt: skip
        assert answer.output_text == "".join(WORDS[:3])
        assert (answer.status, answer.error, answer.metadata) == ("incomplete", None, {"a": "b"})
        assert answer.incomplete_details is not None
        assert answer.incomplete_details.reason == "max_output_tokens"
        assert (answer.instructions, answer.max_output_tokens, answer.temperature, answer.top_p) == ("Be brief", 3, 0, 1)
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
        assert answer.id == f"resp_{api.requests[0].request_id}"
        assert answer.model_extra is not None
        assert answer.model_extra["store"] is False
        assert answer.model_extra["pdserve"]["placement"] == "disaggregated"
        kinds.Response.model_validate(answer.model_dump())  # every field has OpenAI's type
        request = api.requests[0]
        assert request.prompt == (ChatMessage("system", "Be brief"), ChatMessage("user", "Say hello"))
        assert request.sampling == {"max_tokens": 3, "temperature": 0.0, "top_k": 0, "seed": 7}
        assert (request.correlation_id, request.deadline_s) == ("mine", 5)

    asyncio.run(run())


def test_the_events_of_a_stream() -> None:
    async def run() -> None:
        async with served(FakeApi()) as base, client(base) as c:
            stream = await c.responses.create(model=MODEL, input="Say hello", stream=True)
            events = [event async for event in stream]
        types = [event.type.removeprefix("response.") for event in events]
        assert types == [
            "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * len(WORDS),
            "output_text.done", "content_part.done", "output_item.done", "incomplete",
        ]  # fmt: skip
        assert [event.sequence_number for event in events] == [*range(len(events))]
        told: list[Any] = list(events)
        assert "".join(event.delta for event in told[4:-4]) == "".join(WORDS) == told[-4].text == told[-1].response.output_text
        assert len({event.item_id for event in told[3:-2]}) == 1
        for event in events:
            type(event).model_validate(event.model_dump())

    asyncio.run(run())


def test_the_stream_helper_and_the_whole_answer_agree() -> None:
    async def run() -> None:
        async with served(FakeApi(finish_reason=FinishReason.STOP)) as base, client(base) as c:
            whole = await c.responses.create(model=MODEL, input="x", include=INCLUDE, top_logprobs=2)
            async with c.responses.stream(model=MODEL, input="x", include=INCLUDE, top_logprobs=2) as stream:
                deltas = [event async for event in stream if event.type == "response.output_text.delta"]
                final = await stream.get_final_response()
        assert final.output_text == whole.output_text
        assert (final.status, whole.status, whole.incomplete_details) == ("completed", "completed", None)
        part, other = whole.output[0].content[0], final.output[0].content[0]  # type: ignore[union-attr]
        assert part.logprobs == other.logprobs  # type: ignore[union-attr]
        told = [one for event in deltas for one in event.logprobs]
        assert [one.logprob for one in told] == [one.logprob for one in part.logprobs]  # type: ignore[union-attr]
        assert [len(one.top_logprobs or []) for one in told] == [2] * len(WORDS)

    asyncio.run(run())


def test_text_format_is_the_constraint_of_a_chat() -> None:
    class Person(pydantic.BaseModel):
        name: str

    async def run() -> None:
        api = FakeApi(words=('{"name":', '"Ada"}'))
        async with served(api) as base, client(base) as c:
            parsed = await c.responses.parse(model=MODEL, input="Who?", text_format=Person)
        assert parsed.output_parsed == Person(name="Ada")
        assert api.requests[0].constraint is not None
        assert api.requests[0].constraint.kind is ConstraintKind.JSON_SCHEMA
        assert json.loads(api.requests[0].constraint.text)["required"] == ["name"]

    asyncio.run(run())
    assert asked(text={"format": {"type": "json_object"}}).call.inputs[0].constraint.kind is ConstraintKind.JSON_OBJECT
    assert asked(text={"format": {"type": "text"}}).call.inputs[0].constraint is None


def test_an_answer_can_be_sent_back() -> None:
    """A client keeps the conversation itself, because nothing is stored: the items of answers are items of inputs."""

    async def run() -> None:
        api = FakeApi()
        async with served(api) as base, client(base) as c:
            first = await c.responses.create(model=MODEL, input="one", include=INCLUDE)
            items: list[Any] = [
                {"role": "developer", "content": "rule"}, {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
                *first.output, {"type": "message", "role": "user", "content": "two"},
            ]  # fmt: skip
            second = await c.responses.with_raw_response.create(model=MODEL, input=items)
        assert "x-pdserve-ignored-fields" not in second.headers
        assert api.requests[1].prompt == (
            ChatMessage("system", "rule"), ChatMessage("user", "one"), ChatMessage("assistant", "".join(WORDS)),
            ChatMessage("user", "two"),
        )  # fmt: skip

    asyncio.run(run())


def test_a_response_is_the_request_of_a_chat() -> None:
    shared = {"temperature": 0.5, "top_p": 0.9, "seed": 3, "stop": ["x"], "logit_bias": {"5": 1}, "priority": 2, "min_p": 0.1,
              "stop_token_ids": [4], "session_id": "s", "cache_salt": "c", "placement": "colocated"}  # fmt: skip
    own = asked(**shared, max_output_tokens=9, top_logprobs=3, include=INCLUDE).call.inputs[0]
    messages = [{"role": "user", "content": "hi"}]
    body = {**shared, "messages": messages, "max_tokens": 9, "logprobs": True, "top_logprobs": 3}
    chat = parse_chat(json.dumps(body).encode(), None).inputs[0]
    for name in ("prompt", "sampling", "options", "session_id", "placement", "constraint", "deadline_s"):
        assert getattr(own, name) == getattr(chat, name), name


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "c"}), ("background", {"background": True}), ("prompt", {"prompt": {"id": "p"}}),
        ("max_tokens", {"max_tokens": 3}),
        ("n", {"n": 2}),
        ("include[1]", {"include": [*INCLUDE, "reasoning.all"]}),
        ("top_logprobs", {"top_logprobs": 2}),
        ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "x"}}}),
        ("text.format.schema", {"text": {"format": {"type": "text", "schema": {}}}}),
        ("text.format", {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "x"}}),
        ('metadata["a key"]', {"metadata": {"a key": "v" * 513}}), ("metadata", {"metadata": {str(i): "" for i in range(17)}}),
        ("input", {"input": []}), ("input", {"input": None}), ("input[0]", {"input": [3]}),
        ("input[1].type", {"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "x"}]}),
        ("input[0].content[0].type", {"input": [{"type": "reasoning", "content": [{"type": "summary_text", "text": "x"}]}]}),
        ("input[1].arguments", {"input": [SAID, {**CALLED, "arguments": []}]}),
        ("input[1].async", {"input": [SAID, {**CALLED, "async": True}]}),
        ("input[0].call_id", {"input": [{"type": "function_call_output", "call_id": "", "output": "x"}]}),
        ("input[0].output[0].type", {"input": [{**RESULT, "output": [{"type": "input_image"}]}]}),
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[1].name", {"tools": [TOOL, TOOL]}),
        ("tools[0].name", {"tools": [{"type": "function"}]}),
        ("tools[0].parameters.type", {"tools": [{**TOOL, "parameters": {"type": "array"}}]}),
        ("tools[0].async", {"tools": [{**TOOL, "async": True}]}),
        ("tools", {"tools": [TOOL] * 129}),
        ("tool_choice", {"tool_choice": "never"}),
        ("tool_choice.type", {"tool_choice": {"type": "allowed_tools"}}),
        ("tool_choice.name", {"tool_choice": {"type": "function"}}),
        ("input[0].role", {"input": [{"role": "robot", "content": "x"}], "instructions": "first"}),
        ("input[0].content", {"input": [{"role": "user"}], "instructions": "first"}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("input[0].content[0].text", {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
        ("stream_options", {"stream_options": {}}),
    ],
)  # fmt: skip
def test_what_is_refused_has_the_name_that_the_client_wrote(field: str, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**fields)
    assert caught.value.field == field
    assert caught.value.message.startswith(field)


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_an_error_about_a_stored_conversation_did_not_say_where_to_put_it(field: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is not supported.*; use input$"):
        asked(**{field: "resp_1"})


def test_items_of_calls_are_messages_of_a_chat() -> None:
    """The conversation of an agent: what the answers held goes back with the results of calls."""
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    second = {**CALLED, "call_id": "c2", "id": "fc_2", "status": "completed", "arguments": '{"city": "Oslo"}'}
    items = [{"role": "user", "content": "Rain?"}, reasoning, SAID, CALLED, second, RESULT,
             {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
             reasoning, {"role": "user", "content": "So?"}, CALLED]  # fmt: skip
    found = asked(input=items, tools=[TOOL], tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=False)
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
             {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]  # fmt: skip
    messages = [
        {"role": "user", "content": "Rain?"},
        {**SAID, "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"}, {"role": "tool", "tool_call_id": "c2", "content": "sun"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm."}, {"role": "user", "content": "So?"},
        {"role": "assistant", "tool_calls": calls[:1]},
    ]  # fmt: skip
    choice = {"type": "function", "function": {"name": "weather"}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    body = {"messages": messages, "tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
    chat = parse_chat(json.dumps(body).encode(), None).inputs[0]
    assert found.call.inputs[0].tool_choice == chat.tool_choice
    own, theirs = found.call.inputs[0].prompt, chat.prompt
    assert own.messages == theirs.messages
    assert [(tool.name, json.loads(tool.parameters)) for tool in own.tools] == [("weather", {"type": "object"})]
    assert json.loads(b"{%b}" % found.repeated)["tools"] == [{**TOOL, "description": None, "strict": None}]


def test_unknown_fields_of_items_are_named() -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "x", "a": 1}], "b": 1}] * 3
    ignored = asked(input=items, c=1).ignored
    assert (sorted(ignored.names), ignored.count) == (["c", "input[].b", "input[].content[].a"], 7)


def test_an_error_before_the_stream_is_an_answer_and_one_inside_it_an_event() -> None:
    async def run() -> None:
        async with served(FakeApi(error=Overloaded("full", retry_after_s=2))) as base, client(base) as c:
            with pytest.raises(openai.RateLimitError):
                await c.responses.create(model=MODEL, input="x", stream=True)
        async with served(FakeApi(error=ReplicaLost("gone"), fail_at=2)) as base, client(base) as c:
            stream = await c.responses.create(model=MODEL, input="x", stream=True)
            events: list[Any] = [event async for event in stream]
            assert events[-1].type == "response.failed"
            assert (events[-1].response.status, events[-1].response.error.message) == ("failed", "gone")
            assert events[-1].response.model_extra["pdserve"]["prompt_tokens"] == 1
            assert [event.sequence_number for event in events] == [*range(len(events))]
            whole = await exchange(base, post(RESPONSES, {"input": "x"}))
            assert (whole.status, whole.error["code"]) == (503, "replica_lost")
            assert "pdserve-timeline" in whole.headers

    asyncio.run(run())


def test_a_client_that_leaves_ends_its_response() -> None:
    async def run() -> None:
        api = FakeApi()
        api.gate.clear()
        async with served(api) as base:
            _, writer = await connect(base)
            writer.write(post(RESPONSES, {"input": "x", "stream": True}))
            await api.submitted.wait()
            writer.close()
            async with asyncio.timeout(60):
                await api.closed.wait()

    asyncio.run(run())


def test_a_hundred_thousand_items_are_refused_by_their_count() -> None:
    async def run() -> None:
        async with served(FakeApi(max_body_bytes=8 << 20)) as base:
            items = [{"role": "user", "content": "x"}] * 100_000
            answer = await exchange(base, post(RESPONSES, {"input": items}))
            assert (answer.status, answer.error["param"]) == (400, "input")
            deep = (
                b'{"input": "x", "text": {"format": {"type": "json_schema", "schema": ' + b"[" * 10_000 + b"]" * 10_000 + b"}}}"
            )
            assert (await exchange(base, post(RESPONSES, deep))).status == 400
            most = await exchange(base, post(RESPONSES, {"input": [{"role": "user", "content": "x"}] * MAX_MESSAGES}))
            assert most.status == 200
            reader, writer = await connect(base)
            writer.write(head("GET", RESPONSES))
            assert (await read_answer(reader)).status == 405
            writer.close()

    asyncio.run(run())


def test_no_text_of_a_request_breaks_the_frame_of_events() -> None:
    async def run() -> None:
        hostile = "a\n\ndata: {}\r\n\u2028\x00\U0001f600"
        async with served(FakeApi(words=(hostile,))) as base, client(base) as c:
            form = b'{"format": {"type": "json_schema", "schema": {\n\n"a": 1}}}'
            body = b'{"input": "x", "stream": true, "instructions": %s, "text": %s}' % (json.dumps(hostile).encode(), form)
            answer = await exchange(base, post(RESPONSES, body))
            events = answer.body.decode().removesuffix("\n\n").split("\n\n")
            assert all(event.count("\n") == 1 for event in events)
            last = json.loads(events[-1].split("data: ", 1)[1])["response"]
            assert last["instructions"] == hostile == last["output"][0]["content"][0]["text"]
            assert last["text"]["format"]["schema"] == {"a": 1}
            found = await c.responses.create(model=MODEL, input="x", metadata={"logprobs": hostile})
            assert found.metadata == {"logprobs": hostile}

    asyncio.run(run())
