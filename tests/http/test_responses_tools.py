"""Calls and reasoning in `/v1/responses`, through the real router from workers that speak a script."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from test_tools_served import CALLED, MESSAGES, SPOKEN, run, speaking, whole
from test_tools_served import TOOLS as CHATS_TOOLS

TOOLS: Any = [{"type": "function", **tool["function"]} for tool in CHATS_TOOLS]
THOUGHT = "<think>\nHm, 1 < 2.\n</think>\n\n"


def items_of(response: Any) -> list[tuple[str, str]]:
    """The items of an answer with their texts."""
    found = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.name, item.arguments))
        else:
            (part,) = item.content
            found.append((item.type, part.text))
    return found


WANTED = [("reasoning", "Hm, 1 < 2."), ("message", "Let me look."), *CALLED]


@pytest.mark.parametrize("size", [1, 3, 500])
def test_calls_and_reasoning_are_items_whole_and_streamed(size: int) -> None:
    async def story() -> None:
        async with speaking(THOUGHT + SPOKEN, size=size) as (_, client):
            answer = await client.responses.create(model="tiny", input=MESSAGES, tools=TOOLS)
            assert items_of(answer) == WANTED
            assert (answer.status, answer.tool_choice, [tool.name for tool in answer.tools]) == (  # type: ignore[union-attr]
                "completed", "auto", ["get_weather", "now"],
            )  # fmt: skip
            assert answer.usage is not None
            thought, spoken = answer.usage.output_tokens_details.reasoning_tokens, answer.usage.output_tokens
            assert 0 < thought <= spoken  # tokens that come together are shared by the lengths of their texts
            assert size > 1 or thought < spoken
            async with client.responses.stream(model="tiny", input=MESSAGES, tools=TOOLS) as stream:
                events: list[Any] = [event async for event in stream]
                final = await stream.get_final_response()
            assert items_of(final) == WANTED
            assert [item.status for item in final.output] == ["completed"] * 4  # type: ignore[union-attr]
            check_events(events)
            assert [call.id for call in answer.output] != [call.id for call in final.output]

    run(story())


def check_events(events: list[Any]) -> None:
    """Each item is added, grows and is done, one after the other, and its pieces are its text."""
    assert [event.sequence_number for event in events] == [*range(len(events))]
    open_item: Any = None
    pieces = ""
    for event in events[2:-1]:
        if event.type == "response.output_item.added":
            assert open_item is None
            open_item, pieces = event.item, ""
            continue
        assert getattr(event, "item_id", open_item.id) == open_item.id
        if event.type.endswith(".delta"):
            pieces += event.delta
        elif event.type.endswith(("_text.done", "_arguments.done")):
            assert pieces == getattr(event, "text", None) or pieces == event.arguments
        elif event.type == "response.output_item.done":
            assert (event.item.id, event.item.type) == (open_item.id, open_item.type)
            open_item = None
    assert open_item is None
    assert events[-1].type == "response.completed"


def test_an_agents_loop_sends_items_and_results_back() -> None:
    """The second request has the prompt that the same conversation has as a chat."""

    async def story() -> None:
        async with speaking(THOUGHT + SPOKEN) as (_, client):
            first = await client.responses.create(model="tiny", input=MESSAGES, tools=TOOLS)
            calls = [item for item in first.output if item.type == "function_call"]
            results: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "sun"} for call in calls]
            second = await client.responses.with_raw_response.create(
                model="tiny", input=[*MESSAGES, *first.output, *results], tools=TOOLS
            )
            assert "x-pdserve-ignored-fields" not in second.headers
            spoken = [
                {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
            ]
            said = {"role": "assistant", "content": "Let me look.", "reasoning_content": "Hm, 1 < 2.", "tool_calls": spoken}
            chat: Any = [
                *MESSAGES, said,
                *({"role": "tool", "tool_call_id": call.call_id, "content": "sun"} for call in calls),
            ]  # fmt: skip
            answer = await client.chat.completions.create(model="tiny", messages=chat, tools=CHATS_TOOLS)
            usage = second.parse().usage
            assert usage is not None
            assert answer.usage is not None
            assert usage.input_tokens == answer.usage.prompt_tokens

    run(story())


def test_a_text_without_tools_is_one_message() -> None:
    async def story() -> None:
        async with speaking(SPOKEN) as (_, client):
            answer = await client.responses.create(model="tiny", input=MESSAGES)
            assert items_of(answer) == [("message", SPOKEN)]
            chosen = await client.responses.create(model="tiny", input=MESSAGES, tools=TOOLS, tool_choice="none")
            assert (items_of(chosen), chosen.tool_choice) == ([("message", SPOKEN)], "none")
            one = await client.responses.create(model="tiny", input=MESSAGES, tools=TOOLS, parallel_tool_calls=False)
            assert [item.type for item in one.output].count("function_call") == 1
            assert (await whole(client, tools=CHATS_TOOLS, parallel_tool_calls=False))[2] == CALLED[:1]

    run(story())


@pytest.mark.parametrize("size", [1, 500])
def test_text_behind_calls_is_a_message_behind_them_however_it_arrives(size: int) -> None:
    async def story() -> None:
        async with speaking(f"{SPOKEN} There.", size=size) as (_, client):
            answer = await client.responses.create(model="tiny", input=MESSAGES, tools=TOOLS)
            assert items_of(answer) == [("message", "Let me look."), *CALLED, ("message", "There.")]

    run(story())


def test_log_probabilities_are_those_of_the_message_alone() -> None:
    async def story() -> None:
        async with speaking(THOUGHT + SPOKEN) as (_, client):
            include: Any = ["message.output_text.logprobs"]
            answer: Any = await client.responses.create(model="tiny", input=MESSAGES, tools=TOOLS, include=include)
            (part,) = answer.output[1].content
            assert 0 < len(part.logprobs) < answer.usage.output_tokens
            events: list[Any] = []
            async with client.responses.stream(model="tiny", input=MESSAGES, tools=TOOLS, include=include) as stream:
                events = [event async for event in stream]
            told = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
            assert [one.token for one in told] == [one.token for one in part.logprobs]

    run(story())


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("reasoning.effort", {"reasoning": {"effort": "low"}}),
    ("input", {"template": "{{ raise_exception('no') }}"}),
    ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"pattern": "(", "type": "string"}}}}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "fields"), REFUSED)
def test_what_the_router_refuses_has_the_name_that_the_client_wrote(field: str, fields: dict[str, Any]) -> None:
    async def story() -> None:
        given = dict(fields)
        settings = {"template": given.pop("template")} if "template" in given else {}
        async with speaking("x", **settings) as (_, client):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="tiny", **{"input": MESSAGES, **given})
            assert (caught.value.param or "").startswith(field), caught.value.message
            assert json.dumps(caught.value.body)
            assert caught.value.message.count(field) >= 1

    run(story())
