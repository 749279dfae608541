"""Calls and reasoning through the real router, from workers that speak a script: both APIs, both placements, and a loss."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import openai
import pytest
from click.testing import CliRunner

from pdserve.cli import main
from pdserve.core.errors import ConfigError
from pdserve.core.worker import CONSTRAINT_LINK_VERSION
from pdserve.rpc.v1 import common_pb2, inference_pb2
from pdserve.text.chat import ChatTemplate
from pdserve.text.tokenizer import Tokenizer
from router.http import serve_http
from testkit.fake_worker import DECODE, PREFILL
from tests.router.local_cluster import LocalCluster, local_cluster, tiny_model

TIMEOUT_S = 60.0
TEMPLATE = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}Write <tool_call>.{% endif %}
{% for m in messages %}[{{ m.role }}]{{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}
{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"""
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {}}}}},
    {"type": "function", "function": {"name": "now"}},
]
STRICT_TOOLS: Any = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
"""The helper of OpenAI's client takes no others."""
MESSAGES: Any = [{"role": "user", "content": "Weather in Rome?"}]
SPOKEN = (
    'Let me look.\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Röme"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
CALLED = [("get_weather", '{"city": "Röme"}'), ("now", "{}")]


def run(story: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await story

    asyncio.run(bounded())


def templated(source: str) -> Any:
    tokenizer = tiny_model().tokenizer
    return dataclasses.replace(
        tiny_model(), max_model_len=2048, tokenizer=Tokenizer(tokenizer._backend, ChatTemplate(source, {}))
    )


def pieces(text: str, size: int = 3) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


@asynccontextmanager
async def speaking(
    text: str, *, template: str = TEMPLATE, roles: Any = (PREFILL, DECODE), size: int = 3, **config: Any
) -> AsyncIterator[tuple[LocalCluster, openai.AsyncOpenAI]]:
    """A cluster whose workers say `text`, and a client of it."""
    settings = {"script": pieces(text, size), "link_version": CONSTRAINT_LINK_VERSION}
    async with local_cluster(roles, worker=lambda: settings, model=templated(template), **config) as cluster:
        server = await serve_http(cluster.service, cluster.parser, "127.0.0.1", 0)
        client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=60)
        try:
            yield cluster, client
        finally:
            await client.close()
            await server.close()


async def streamed(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str, str, list[tuple[str, str]], str | None, list[str]]:
    """Return content, reasoning, calls, finish reason and the ids of calls, put together as a client does."""
    content, reasoning, finish, ids = "", "", None, []
    calls: list[tuple[str, str]] = []
    stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **fields)
    async for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        told = choice.delta.model_extra or {}
        assert told.get("reasoning") == told.get("reasoning_content")
        reasoning += told.get("reasoning") or ""
        for piece in choice.delta.tool_calls or ():
            assert piece.function is not None
            if piece.index == len(calls):
                assert piece.id is not None
                ids.append(piece.id)
                calls.append((piece.function.name or "", ""))
            else:
                assert piece.id is None
                assert piece.function.name is None
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + (piece.function.arguments or ""))
        finish = choice.finish_reason or finish
    return content, reasoning, calls, finish, ids


async def whole(client: openai.AsyncOpenAI, **fields: Any) -> tuple[str | None, str, list[tuple[str, str]], str, list[str]]:
    answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, **fields)
    (choice,) = answer.choices
    calls = choice.message.tool_calls or []
    told = choice.message.model_extra or {}
    assert told.get("reasoning") == told.get("reasoning_content")
    found = [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]
    return choice.message.content, told.get("reasoning", ""), found, choice.finish_reason, [call.id for call in calls]


def test_calls_arrive_whole_and_in_pieces_from_one_pool_and_from_two() -> None:
    async def story() -> None:
        seen: set[str] = set()
        for size in (1, 3, 500):
            async with speaking(SPOKEN, size=size) as (_, client):
                for placement in ("disaggregated", "colocated"):
                    fields: Any = {"tools": TOOLS, "extra_body": {"placement": placement}}
                    for ask in (streamed, whole):
                        *answer, ids = await ask(client, **fields)
                        assert answer == ["Let me look.", "", CALLED, "tool_calls"]
                        assert all(one.startswith("call_") for one in ids)
                        assert seen.isdisjoint(ids)
                        seen.update(ids)

    run(story())


@pytest.mark.parametrize("size", [3, 500])
def test_the_end_of_every_call_reaches_openais_stream_helper(size: int) -> None:
    """The helper never told of the end of a call that began in the chunk with the finish reason."""

    async def story() -> None:
        async with (
            speaking(SPOKEN, size=size) as (_, client),
            client.chat.completions.stream(model="tiny", messages=MESSAGES, tools=STRICT_TOOLS) as stream,
        ):
            ended = [e.arguments async for e in stream if e.type == "tool_calls.function.arguments.done"]
        assert ended == [arguments for _, arguments in CALLED]

    run(story())


def test_a_lost_worker_changes_no_call() -> None:
    async def story() -> None:
        async with speaking(SPOKEN, roles=(PREFILL, DECODE, DECODE), size=2) as (cluster, client):
            asked = asyncio.create_task(streamed(client, tools=TOOLS))
            for worker in cluster.workers:
                if worker.role == DECODE:
                    worker.token_interval_s = 0.01
            serving = None
            while serving is None:
                await asyncio.sleep(0.005)
                serving = next((w for w in cluster.workers if w.role == DECODE and w.live_handles), None)
            await asyncio.sleep(0.2)
            await serving.stop()
            *answer, _ = await asked
            assert answer == ["Let me look.", "", CALLED, "tool_calls"]
            assert 'reason="replica_lost"' in cluster.service.metrics().decode()

    run(story())


def test_the_content_is_null_beside_calls_alone_and_nothing_is_read_without_tools() -> None:
    async def story() -> None:
        only = SPOKEN[SPOKEN.index("<tool_call>") :]
        async with speaking(only) as (_, client):
            assert (await whole(client, tools=TOOLS))[:4] == (None, "", CALLED, "tool_calls")
            assert (await whole(client))[:4] == (only, "", [], "stop")
            assert (await whole(client, tools=TOOLS, tool_choice="none"))[:4] == (only, "", [], "stop")
            content, _, calls, finish, _ = await whole(client, tools=TOOLS, parallel_tool_calls=False)
            assert (content, calls, finish) == (None, CALLED[:1], "tool_calls")  # nobody sees the markup of the second call

    run(story())


def test_reasoning_stands_beside_the_content() -> None:
    async def story() -> None:
        for opened, text in ((False, "<think>\nHm, 1 < 2.\n</think>\n\n" + SPOKEN), (True, "Hm, 1 < 2.</think>" + SPOKEN)):
            async with speaking(text) as (_, client):
                fields: Any = {"extra_body": {"chat_template_kwargs": {"enable_thinking": opened}}}
                for ask in (streamed, whole):
                    assert (await ask(client, tools=TOOLS, **fields))[:4] == (
                        "Let me look.",
                        "Hm, 1 < 2.",
                        CALLED,
                        "tool_calls",
                    )
                    assert (await ask(client, **fields))[:4] == (SPOKEN, "Hm, 1 < 2.", [], "stop")
                for usage in await usages(client, fields["extra_body"]):
                    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
            async with speaking(text, reasoning_parser="none") as (_, client):
                assert (await whole(client))[:4] == (text, "", [], "stop")
                assert [usage.completion_tokens_details.reasoning_tokens for usage in await usages(client)] == [0, 0]

    run(story())


async def usages(client: openai.AsyncOpenAI, extra: dict[str, Any] | None = None) -> list[Any]:
    """Return the usage of a whole chat and of a streamed one."""
    body: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "extra_body": extra}
    stream = await client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True})
    return [(await client.chat.completions.create(**body)).usage, [chunk async for chunk in stream][-1].usage]


def test_grpc_tells_calls_and_reasoning_in_pieces() -> None:
    async def story() -> None:
        async with speaking("<think>Hm</think>" + SPOKEN) as (cluster, _):
            chat = inference_pb2.ChatPrompt(tools=[json.dumps(tool) for tool in TOOLS])
            chat.messages.add(role="user", content="Weather?")
            text, reasoning, reason = "", "", 0
            calls: list[list[str]] = []
            async for message in cluster.stub.Generate(inference_pb2.GenerateRequest(chat=chat)):
                text, reasoning, reason = text + message.text, reasoning + message.reasoning, message.finish_reason
                for piece in message.tool_calls:
                    if piece.id:
                        calls.append([piece.name, ""])
                    calls[piece.index][1] += piece.arguments
            assert (text, reasoning, [tuple(call) for call in calls]) == ("Let me look.", "Hm", CALLED)
            assert reason == common_pb2.FINISH_REASON_TOOL_CALLS

            request = inference_pb2.GenerateRequest(chat=chat, tool_choice=inference_pb2.ToolChoice(function="other"))
            with pytest.raises(grpc.aio.AioRpcError, match="'other' is none of the tools"):
                await cluster.stub.Generate(request).read()
            plain = await cluster.stub.Tokenize(
                inference_pb2.TokenizeRequest(chat=inference_pb2.ChatPrompt(messages=chat.messages))
            )
            shown = await cluster.stub.Tokenize(inference_pb2.TokenizeRequest(chat=chat))
            assert len(shown.ids) > len(plain.ids) + 50

    run(story())


def test_the_chat_command_shows_reasoning() -> None:
    async def story() -> None:
        async with speaking("<think>Hm, 1 < 2.</think>Yes.") as (cluster, _):
            arguments = ["chat", "--address", cluster.grpc_address]
            result = await asyncio.to_thread(CliRunner().invoke, main, arguments, input="Is it?\n")
            assert "Hm, 1 < 2." in result.stdout
            assert "Yes." in result.stdout
            assert "<think>" not in result.stdout

    run(story())


def test_each_choice_has_calls_of_its_own() -> None:
    async def story() -> None:
        async with speaking(SPOKEN) as (_, client):
            made = await client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, n=3)
            ids: set[str] = set()
            for choice in made.choices:
                calls = [call for call in choice.message.tool_calls or () if call.type == "function"]
                assert [(call.function.name, call.function.arguments) for call in calls] == CALLED
                assert choice.finish_reason == "tool_calls"
                ids.update(call.id for call in calls)
            assert len(ids) == 6
            told = [["", ""], ["", ""], ["", ""]]
            stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, n=3, stream=True)
            async for chunk in stream:
                for choice in chunk.choices:
                    for piece in choice.delta.tool_calls or ():
                        assert piece.function is not None
                        told[choice.index][piece.index] += piece.function.arguments or ""
            assert told == [[arguments for _, arguments in CALLED]] * 3

    run(story())


def test_a_model_whose_template_shows_no_tools_makes_required_calls() -> None:
    async def story() -> None:
        plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        said = '[{"name": "now", "parameters": {}}]'
        async with speaking(said, template=plain) as (_, client):
            first = await whole(client, tools=TOOLS, tool_choice="required")
            assert first[:4] == (None, "", [("now", "{}")], "tool_calls")
            named = await whole(client, tools=TOOLS, tool_choice=CHOSEN)
            assert named[2] == [("now", said)]
            call = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
            talk: Any = [
                *MESSAGES,
                {"role": "assistant", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "a", "content": "1"},
            ]
            for choice in ("required", "none"):
                await client.chat.completions.create(model="tiny", messages=talk, tools=TOOLS, tool_choice=choice)  # type: ignore[call-overload]

    run(story())


STRICT: Any = [{"type": "function", "function": {"name": "f", "strict": True}}]


def test_agents_with_strict_tools_are_served_whatever_the_form_of_calls() -> None:
    """Agent frameworks send `strict` always. Where no grammar enforces it, the answer says so."""

    async def story(parser: str, ignored: str | None) -> None:
        async with speaking("Hi", tool_call_parser=parser) as (cluster, client):
            create = client.chat.completions.with_raw_response.create
            answer = await create(model="tiny", messages=MESSAGES, tools=STRICT)
            assert answer.headers.get("x-pdserve-ignored-fields") == ignored
            forced = await create(model="tiny", messages=MESSAGES, tools=STRICT, tool_choice="required")
            assert "x-pdserve-ignored-fields" not in forced.headers
            flat: Any = [{"type": "function", "name": "f", "strict": True}]
            response = await client.responses.with_raw_response.create(model="tiny", input="Hi", tools=flat)
            wanted = ignored and ignored.replace(".function", "")
            assert response.headers.get("x-pdserve-ignored-fields") == wanted
            chat = inference_pb2.ChatPrompt(tools=[json.dumps(tool) for tool in STRICT])
            chat.messages.add(role="user", content="Hi")
            call = cluster.stub.Generate(inference_pb2.GenerateRequest(chat=chat))
            assert dict(await call.initial_metadata()).get("x-pdserve-ignored-fields") == ignored

    run(story("granite", None))
    run(story("pythonic", "tools[0].function.strict"))


PERSON: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": {"type": "object"}}}


def test_tools_stand_beside_a_structured_answer() -> None:
    """An agent's model calls as long as it needs to, and then answers in the form that the agent wants."""

    async def story(text: str, content: str, calls: list[tuple[str, str]]) -> None:
        finish = "tool_calls" if calls else "stop"
        async with speaking(text) as (_, client):
            for ask in (streamed, whole):
                answer = await ask(client, tools=TOOLS, response_format=PERSON)
                assert (answer[0] or "", *answer[1:4]) == (content, "", calls, finish)
            forced = await whole(client, tools=TOOLS, response_format=PERSON, tool_choice=CHOSEN)
            assert forced[2] == [("now", text)]
            told = {"format": {"type": "json_schema", "name": "person", "schema": {"type": "object"}}}
            tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
            made = await client.responses.create(model="tiny", input=MESSAGES, tools=tools, text=told)  # type: ignore[call-overload]
            assert made.output_text == content
            assert [(one.name, one.arguments) for one in made.output if one.type == "function_call"] == calls

    only = SPOKEN[SPOKEN.index("<tool_call>") :]
    quoting = '{"note": "<tool_call>{}</tool_call><think>"}'
    run(story(only, "", CALLED))
    run(story(quoting, quoting, []))


CHOSEN: Any = {"type": "function", "function": {"name": "now"}}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("tools: the model's chat template shows no tools", {"tools": TOOLS, "template": "{{ messages }} <tool_call>"}),
    ("tools: the router knows no form of calls", {"tools": TOOLS, "template": "{{ messages[0].content }}{{ tools }}"}),
    ("response_format.json_schema.schema: cannot be compiled", {"tools": TOOLS, "response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "("}},
    }}),
    ("tools: cannot be compiled", {"tools": [{"type": "function", "function": {
        "name": "f", "strict": True, "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
    }}]}),
    ("tools: are not allowed beside a beam search", {"tools": TOOLS, "use_beam_search": True, "n": 2}),
    ("tool_choice: is only allowed with tools", {"tool_choice": "required"}),
    ("tool_choice: 'f' is none of the tools", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("chat_template_kwargs.style: is no variable", {"chat_template_kwargs": {"style": "short"}}),
    ("chat_template_kwargs.messages: is no variable", {"chat_template_kwargs": {"messages": []}}),
    ("reasoning_effort: is no variable", {"reasoning_effort": "low"}),
    ("tools: cannot be compiled", {"tool_choice": "required", "tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}},
    }}]}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "fields"), REFUSED)
def test_what_cannot_be_done_with_tools_is_refused_by_name(message: str, fields: dict[str, Any]) -> None:
    async def story() -> None:
        given = dict(fields)
        async with speaking("x", template=given.pop("template", TEMPLATE)) as (_, client):
            body = {"model": "tiny", "messages": MESSAGES, **given}
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post("/chat/completions", cast_to=object, body=body)
            assert message in caught.value.message

    run(story())


def test_a_chat_goes_on_with_the_assistants_last_message() -> None:
    async def story() -> None:
        async with speaking("x", template=f"{TEMPLATE}<end>") as (cluster, client):
            talk = [*MESSAGES, {"role": "assistant", "content": " It is "}]
            fields = {"add_generation_prompt": False, "continue_final_message": True}
            answer = await client.chat.completions.create(model="tiny", messages=talk, extra_body=fields)
            closed = await client.chat.completions.create(model="tiny", messages=talk)
            assert answer.usage is not None
            assert closed.usage is not None
            prompt = cluster.service.model.tokenizer.encode(
                "[user]Weather in Rome?[assistant] It is ", add_special_tokens=False
            )
            assert answer.usage.prompt_tokens == len(prompt)
            assert closed.usage.prompt_tokens > len(prompt)

    run(story())


def test_a_parser_that_does_not_exist_ends_the_start() -> None:
    async def story(**config: Any) -> None:
        async with local_cluster((), **config):
            pass

    for name in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=f"router.{name} 'other' is none of auto, none, "):
            run(story(**{name: "other"}))
