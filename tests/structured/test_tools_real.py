"""Tools with a real model, through the public openai client: what must be a call is one, valid, wherever it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from pdserve.config import MIB, EngineConfig, RouterConfig
from testkit.processes import ProcessCluster

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome", "Oslo"]}},
}
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()]
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Rome for the next two days?"}]
CHOICES: dict[str, Any] = {
    "required": "required",
    "get_weather": {"type": "function", "function": {"name": "get_weather"}},
    "now": {"type": "function", "function": {"name": "now"}},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ProcessCluster]:
    engine = EngineConfig(model="default", batch_invariant=True, kv_cache_memory=64 * MIB, max_model_len=1024, threads=1)
    router = RouterConfig(colocate_by_cost=False, chat_template=str(EXAMPLES / "tools.jinja"))
    with ProcessCluster(engine, prefill=1, decode=1, router=router) as running:
        yield running


@pytest.fixture
def client(cluster: ProcessCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{cluster.http}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[list[tuple[str, str]], str | None]:
    calls: list[tuple[str, str]] = []
    finish = None
    for chunk in client.chat.completions.create(model="", messages=MESSAGES, tools=TOOLS, stream=True, **fields):
        (choice,) = chunk.choices
        assert not choice.delta.content
        for piece in choice.delta.tool_calls or ():
            assert piece.function is not None
            if piece.index == len(calls):
                calls.append((piece.function.name or "", ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + (piece.function.arguments or ""))
        finish = choice.finish_reason or finish
    return calls, finish


def whole(client: openai.OpenAI, **fields: Any) -> tuple[list[tuple[str, str]], str | None]:
    (choice,) = client.chat.completions.create(model="", messages=MESSAGES, tools=TOOLS, **fields).choices
    assert choice.message.content is None
    calls = choice.message.tool_calls or []
    return [(one.function.name, one.function.arguments) for one in calls if one.type == "function"], choice.finish_reason


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("parallel", [True, False])
def test_what_must_be_a_call_is_a_valid_one_in_two_pools_and_in_one(
    client: openai.OpenAI, choice: str, parallel: bool, temperature: float
) -> None:
    fields: Any = {
        "tool_choice": CHOICES[choice], "parallel_tool_calls": parallel, "max_completion_tokens": 64, "seed": 7,
        "temperature": temperature,
    }  # fmt: skip
    calls, finish = streamed(client, **fields, extra_body={"placement": "disaggregated"})
    assert whole(client, **fields, extra_body={"placement": "colocated"}) == (calls, finish)
    assert calls
    assert finish in ("tool_calls", "length")
    if not parallel or choice != "required":
        assert len(calls) == 1
    if finish == "tool_calls":
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])


@pytest.mark.parametrize("seed", range(2))
def test_an_agent_gets_valid_calls_or_its_structured_answer(client: openai.OpenAI, seed: int) -> None:
    """The model decides which of the two it writes, and can write nothing else."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "days", "schema": WEATHER}}
    strict: Any = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    (choice,) = client.chat.completions.create(
        model="",
        messages=MESSAGES,
        tools=strict,
        response_format=form,
        temperature=1.5,
        seed=seed,
        max_completion_tokens=100,
    ).choices
    calls = [call for call in choice.message.tool_calls or () if call.type == "function"]
    assert bool(calls) != bool(choice.message.content)
    if choice.finish_reason == "length":
        return
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    if choice.message.content:
        jsonschema.validate(json.loads(choice.message.content), WEATHER)


def test_the_model_calls_as_its_history_does(client: openai.OpenAI) -> None:
    """Nothing forces the output here: the model imitates the calls that its template has shown it."""
    talk: list[Any] = []
    for city in ("Paris", "Oslo", "Paris"):
        call = {
            "id": city,
            "type": "function",
            "function": {"name": "get_weather", "arguments": f'{{"city": "{city}", "days": 2}}'},
        }
        talk += [
            {"role": "user", "content": f"Weather in {city}?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": city, "content": "sunny"},
            {"role": "assistant", "content": "It is sunny."},
        ]
    talk.append({"role": "user", "content": "Weather in Rome?"})
    answers = []
    for placement in ("disaggregated", "colocated"):
        (choice,) = client.chat.completions.create(
            model="", messages=talk, tools=TOOLS, temperature=0, max_completion_tokens=60, extra_body={"placement": placement}
        ).choices
        (called,) = choice.message.tool_calls or [None]
        assert called is not None
        assert called.type == "function"
        answers.append((called.function.name, json.loads(called.function.arguments), choice.finish_reason))
    assert answers == [("get_weather", {"city": "Rome", "days": 2}, "tool_calls")] * 2


@pytest.mark.parametrize("parallel", [True, False])
def test_strict_calls_are_valid_where_the_model_decides(client: openai.OpenAI, parallel: bool) -> None:
    """The history shows calls that the schema forbids, and the model still makes none of these."""
    tools: Any = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    talk: list[Any] = []
    for days in (12, 30, 20):
        function = {"name": "get_weather", "arguments": json.dumps({"city": "Wien", "days": days})}
        call = {"id": str(days), "type": "function", "function": function}
        talk += [
            {"role": "user", "content": f"Weather in Wien for {days} days?"},
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "tool_call_id": str(days), "content": "sunny"},
        ]
    talk.append({"role": "user", "content": "Weather in Wien for 15 days?"})
    answers = []
    for placement in ("disaggregated", "colocated"):
        fields: Any = {"parallel_tool_calls": parallel, "extra_body": {"placement": placement}}
        (choice,) = client.chat.completions.create(
            model="", messages=talk, tools=tools, temperature=0, max_completion_tokens=120, **fields
        ).choices
        calls = [one.function for one in choice.message.tool_calls or () if one.type == "function"]
        assert calls
        assert parallel or len(calls) == 1
        if choice.finish_reason == "tool_calls":
            for called in calls:
                jsonschema.validate(json.loads(called.arguments), SCHEMAS[called.name])
        answers.append([(called.name, called.arguments) for called in calls])
    assert answers[0] == answers[1]


def test_the_agent_loop_of_the_examples_runs(cluster: ProcessCluster) -> None:
    command = [
        sys.executable,
        str(EXAMPLES / "agent_loop.py"),
        "--base-url",
        f"http://{cluster.http}/v1",
        "What is 17 times 23?",
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ}, check=False)
    assert result.returncode == 0, result.stderr
    first, *_, last = result.stdout.splitlines()
    assert first.startswith(("add({", "multiply({"))
    assert last
